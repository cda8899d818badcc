"""`coatcheck allow …`: hosts that workloads may reach without any credential. Everything else is refused."""

from typing import Annotated, Any, Final

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import CommandError, WrongUsageError, done, invocation, listing, show_json, show_table
from control_plane.contract.address import is_public
from control_plane.contract.destination import InvalidDestinationError, is_ip_literal, split_authority

_NO_PORT: Final = -1

app = typer.Typer(help="Let workloads reach hosts that need no credential.", no_args_is_help=True)

Host = Annotated[str, typer.Argument(metavar="HOST[:PORT]", show_default=False)]


@app.command("add")
def add(
    context: typer.Context,
    host: Host,
    method: Annotated[list[str] | None, typer.Option(metavar="M", help="Only this method. Repeatable.")] = None,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="The host may be a private or loopback address.")
    ] = False,
    tunnel: Annotated[
        bool, typer.Option("--tunnel", help="Do not look inside its TLS: for clients that pin certificates.")
    ] = False,
) -> None:
    """Allow a host; without a port, 443 for https and 80 for http."""
    fields = rule_of(host)
    if method:
        fields["methods"] = [each.upper() for each in method]
    if allow_private:
        fields["allow_private"] = True
    if tunnel:
        fields["tunnel"] = True
    with control_plane_of(context) as control_plane:
        rule = control_plane.add_allow_rule(fields)
    if invocation(context).as_json:
        show_json(rule)
        return
    done(f"allowed {describe_rule(rule)} (rule {rule['id']})")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every allowed host."""
    with control_plane_of(context) as control_plane:
        rules = control_plane.allow_rules()
    if invocation(context).as_json:
        show_json(rules)
        return
    show_table(
        ["ID", "HOST", "METHODS", "PRIVATE", "TLS", "FOR"],
        [
            (
                each["id"],
                describe_rule(each),
                listing(each.get("methods") or ["any"]),
                "may be" if each.get("allow_private") else "no",
                "unopened" if each.get("tunnel") else "intercepted",
                f"session {each['session']}" if each.get("session") else "every session",
            )
            for each in rules
        ],
        nothing="no allowed hosts: only the destinations of granted credentials can be reached",
    )


@app.command("delete")
def delete(
    context: typer.Context,
    which: Annotated[str, typer.Argument(metavar="ID|HOST[:PORT]", show_default=False)],
) -> None:
    """Withdraw an allow rule, by its id or by its host."""
    with control_plane_of(context) as control_plane:
        for rule_id in _ids(control_plane.allow_rules(), which):
            control_plane.delete_allow_rule(rule_id)
    done(f"{which} is no longer allowed")


def rule_of(text: str) -> dict[str, Any]:
    """`HOST[:PORT]` as the fields of a rule. Raises `WrongUsageError`."""
    if "://" in text or "/" in text:
        # Not repeated: a URL may hold a password.
        raise WrongUsageError("that is a URL; allow its host alone, such as api.example.com or api.example.com:8443")
    try:
        host, port = split_authority(text, default_port=_NO_PORT)
    except InvalidDestinationError as error:
        raise WrongUsageError(f"that is not HOST[:PORT]: {error}") from None
    return {"host": host} if port == _NO_PORT else {"host": host, "port": port}


def is_internal(host: str | None) -> bool:
    """Whether a host is spelt as a private, loopback, link-local or metadata address."""
    if not host:
        return False
    if host == "localhost" or host.endswith((".localhost", ".internal")):
        return True
    return is_ip_literal(host) and not is_public(host)


def describe_rule(rule: Json) -> str:
    host = f"[{rule['host']}]" if ":" in str(rule["host"]) else rule["host"]
    return f"{host}:{rule['port']}" if rule.get("port") else str(host)


def _ids(rules: list[Json], which: str) -> list[str]:
    found = [str(each["id"]) for each in rules if each["id"] == which]
    if not found:
        found = [str(each["id"]) for each in rules if describe_rule(each) == which.lower() and not each.get("session")]
    if not found:
        raise CommandError("there is no such allow rule", "see 'coatcheck allow list'")
    return found
