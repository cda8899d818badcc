"""`coatcheck source …`: places that secrets are read from. What is there is not shown, only whether it can be read."""

from typing import Annotated, Any

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.state import TENANT
from coatcheck.terminal import (
    CommandError,
    WrongUsageError,
    done,
    invocation,
    listing,
    show_fields,
    show_json,
    show_table,
)

app = typer.Typer(help="Places that secrets are read from: Vault, AWS, Kubernetes, files.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
_VAULT, _AWS = "vault", "aws_secrets_manager"
_KINDS = ("file", _VAULT, _AWS, "kubernetes")


@app.command("add")
def add(
    context: typer.Context,
    name: Name,
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(_KINDS)}.")],
    path: Annotated[str, typer.Option(metavar="TEMPLATE", help="Such as 'coatcheck/{tenant}/{name}'.")],
    ttl_seconds: Annotated[float, typer.Option(help="How long a value counts as fresh.")] = 60.0,
    tenant: Annotated[
        list[str] | None, typer.Option(metavar="T", help="Open to this tenant's administrators alone. Repeatable.")
    ] = None,
    address: Annotated[str | None, typer.Option(metavar="URL", help="Vault's, or AWS's instead of its own.")] = None,
    mount: Annotated[str | None, typer.Option(help="Where Vault's KV engine is mounted.")] = None,
    kv_version: Annotated[str | None, typer.Option(help="1 or 2.")] = None,
    field: Annotated[str | None, typer.Option(help="The field that holds the secret.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Vault Enterprise's.")] = None,
    region: Annotated[str | None, typer.Option(help="AWS's.")] = None,
    auth: Annotated[
        str | None, typer.Option(help="Vault: token, kubernetes, approle. AWS: keys, web_identity.")
    ] = None,
    auth_mount: Annotated[str | None, typer.Option(help="Where Vault's way to log in is mounted.")] = None,
    role: Annotated[str | None, typer.Option(help="Vault's Kubernetes role, or the ARN of AWS's.")] = None,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="A name in the folder for such files.")] = None,
    role_id_file: Annotated[str | None, typer.Option(metavar="FILE", help="AppRole's.")] = None,
    secret_id_file: Annotated[str | None, typer.Option(metavar="FILE", help="AppRole's.")] = None,
    keys_file: Annotated[str | None, typer.Option(metavar="FILE", help="AWS access keys.")] = None,
) -> None:
    """Define a source, or replace it. Credentials use it with 'credential add --source NAME --source-name N'."""
    if kind not in _KINDS:
        raise WrongUsageError(f"--kind is one of {', '.join(_KINDS)}")
    proof = _given(
        method=auth, mount=auth_mount, token_file=token_file, role_id_file=role_id_file, secret_id_file=secret_id_file
    )
    body: Json = {"kind": kind, "path_template": path, "ttl_seconds": ttl_seconds}
    if tenant:
        body["tenants"] = tenant
    if kind == _VAULT:
        body["vault"] = _given(
            address=address,
            mount=mount,
            kv_version=kv_version,
            field=field,
            namespace=namespace,
            auth=proof | _given(role=role),
        )
    elif kind == _AWS:
        proof |= _given(role_arn=role, keys_file=keys_file)
        body["aws"] = _given(region=region, endpoint=address, field=field, auth=proof)
    elif proof or address:
        raise WrongUsageError(f"a source of kind {kind} has no address and no way to log in")
    with control_plane_of(context) as control_plane:
        made = control_plane.put_source(name, body)
    if invocation(context).as_json:
        show_json(made)
        return
    done(f"source {name} is there; try it with 'coatcheck source test {name} --name N'")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every source."""
    with control_plane_of(context) as control_plane:
        sources = control_plane.sources()
    if invocation(context).as_json:
        show_json(sources)
        return
    show_table(
        ["NAME", "KIND", "PATH", "FRESH FOR", "TENANTS"],
        [
            (
                each["name"],
                each["kind"],
                each["path_template"],
                f"{each['ttl_seconds']:g} s",
                listing(each["tenants"]) if each["tenants"] else "",
            )
            for each in sources
        ],
        nothing="no sources",
    )


@app.command("show")
def show(context: typer.Context, name: Name) -> None:
    """One source."""
    with control_plane_of(context) as control_plane:
        source = control_plane.source(name)
    if invocation(context).as_json:
        show_json(source)
        return
    show_fields(
        ({"name": source["name"], "kind": source["kind"], "path": source["path_template"]} | _plain(source)).items()
    )


@app.command("test")
def try_out(
    context: typer.Context,
    name: Name,
    name_there: Annotated[str, typer.Option("--name", metavar="N", help="The name that a tenant would give.")],
    tenant: Annotated[str, typer.Option(metavar="T", help="As which tenant.")] = TENANT,
) -> None:
    """Read once and say how it went. What was read is not shown."""
    with control_plane_of(context) as control_plane:
        reading = control_plane.test_source(name, tenant=tenant, name_there=name_there)
    if invocation(context).as_json:
        show_json(reading)
    elif reading["readable"]:
        done(reading["detail"])
    if not reading["readable"]:
        raise CommandError(f"source {name}: {reading['detail']} ({reading['failure']})", "see docs/custody.md")


@app.command("delete")
def delete(context: typer.Context, name: Name) -> None:
    """Take a source away. Refused while credentials read from it."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_source(name)
    done(f"deleted source {name}")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _plain(source: Json) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "fresh for": f"{source['ttl_seconds']:g} s",
        "tenants": listing(source["tenants"] or ["as its kind has it"]),
    }
    for name, value in source["settings"].items():
        if isinstance(value, dict):
            facts |= {f"{name} {inner}": text for inner, text in value.items()}
        else:
            facts[name] = value
    return facts
