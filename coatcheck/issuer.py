"""`coatcheck issuer …`: whom the control plane believes, and exactly in what."""

import getpass
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coatcheck.client import Json
from coatcheck.json_file import STANDARD_INPUT, read_keys, read_object, read_text
from coatcheck.stack import control_plane_of
from coatcheck.terminal import CommandError, done, invocation, listing, show_fields, show_json, show_table

app = typer.Typer(help="Say which issuers' tokens are believed, and in what.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="F", help="The record as JSON; options go before it. '-': standard input.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="P", help="See 'coatcheck issuer presets'.")] = None,
    issuer: Annotated[str | None, typer.Option(metavar="URL", help="The 'iss' of its tokens.")] = None,
    use: Annotated[list[str] | None, typer.Option(metavar="U", help="session, client, admin. Repeatable.")] = None,
    audience: Annotated[list[str] | None, typer.Option(metavar="A", help="Default: ours. Repeatable.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="T", help="All its subjects are of this tenant.")] = None,
    jwks_url: Annotated[str | None, typer.Option(metavar="URL", help="Where its keys are published.")] = None,
    keys_file: Annotated[Path | None, typer.Option(metavar="F", help="Its public keys themselves.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="In place of the record of that name.")] = False,
) -> None:
    """Trust an issuer, in what the options and the file say."""
    record: dict[str, Any] = read_object(file) if file is not None else {}
    given = {"name": name, "preset": preset, "issuer": issuer, "uses": use, "audiences": audience, "jwks_url": jwks_url}
    record |= {field: value for field, value in given.items() if value is not None}
    if keys_file is not None:
        record["keys"] = read_keys(keys_file)
    if tenant is not None:
        record["claims"] = {**_object(record.get("claims")), "tenant": {"fixed": tenant}}
    with control_plane_of(context) as control_plane:
        made = (
            control_plane.replace_issuer(str(record.get("name", "")), record)
            if replace
            else control_plane.add_issuer(record)
        )
    if invocation(context).as_json:
        show_json(made)
        return
    done(f"{made['issuer']} is trusted as {made['name']}, for {listing(made['uses'])}")
    done(f"try a token: coatcheck issuer test {made['name']} --use {made['uses'][0]}")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every trusted issuer."""
    with control_plane_of(context) as control_plane:
        issuers = control_plane.issuers()
    if invocation(context).as_json:
        show_json(issuers)
        return
    show_table(
        ["NAME", "ISSUER", "USES", "AUDIENCES", "KEYS FROM"],
        [
            (each["name"], each["issuer"], listing(each["uses"]), listing(each["audiences"]), _keys_from(each))
            for each in issuers
        ],
        nothing="no issuer is trusted",
    )


@app.command("show")
def show(context: typer.Context, name: Name) -> None:
    """One issuer with its claims table."""
    with control_plane_of(context) as control_plane:
        issuer = control_plane.issuer(name)
    if invocation(context).as_json:
        show_json(issuer)
        return
    claims = issuer["claims"]
    show_fields(
        [
            ("name", issuer["name"]),
            ("preset", issuer["preset"]),
            ("issuer", issuer["issuer"]),
            ("uses", listing(issuer["uses"])),
            ("audiences", listing(issuer["audiences"]) + f" (others: {issuer['other_audiences']})"),
            ("algorithms", listing(issuer["algorithms"])),
            ("types", listing(each or "none" for each in issuer["token_types"])),
            ("keys from", _keys_from(issuer)),
            ("subject", _rule(claims.get("subject"))),
            ("tenant", _rule(claims.get("tenant"))),
            ("roles", _rule(claims.get("roles"))),
            ("admin roles", _rule(claims.get("admin"))),
            ("required", "; ".join(f"{claim} = {listing(values)}" for claim, values in claims["require"].items())),
            ("ignored", listing(claims["ignore"])),
            ("unknown claims", issuer["unknown_claims"]),
        ]
    )


@app.command("delete")
def delete(context: typer.Context, name: Name) -> None:
    """Believe an issuer no more. Sessions that its tokens opened live on."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_issuer(name)
    done(f"{name} is trusted no more; end sessions that it opened with DELETE /v1/sessions/ID")


@app.command("test")
def dry_run(
    context: typer.Context,
    name: Name,
    use: Annotated[str, typer.Option(metavar="U", help="session, client or admin.")] = "session",
) -> None:
    """Say what would become of a token, claim by claim. It is read from standard input, and opens nothing."""
    token = _token(name)
    with control_plane_of(context) as control_plane:
        run = control_plane.test_issuer(name, token, use)
    if invocation(context).as_json:
        show_json(run)
    else:
        _show_run(run)
    if not run["accepted"]:
        raise CommandError(f"the token would be refused: {run['reason']}")


@app.command("presets")
def presets(context: typer.Context) -> None:
    """The issuers that --preset knows."""
    with control_plane_of(context) as control_plane:
        found = control_plane.issuer_presets()
    if invocation(context).as_json:
        show_json(found)
        return
    rows = [(each["id"], each["title"], each["issuer"], each["unknown_claims"]) for each in found]
    show_table(["PRESET", "TOKENS", "ISSUER", "UNKNOWN CLAIMS"], rows, nothing="no presets")


def _token(name: str) -> str:
    """Never an argument: it is as good as a password while it lives."""
    if sys.stdin.isatty():
        return getpass.getpass(f"Token of {name} (not shown): ").strip()
    token = read_text(STANDARD_INPUT).strip()
    if not token:
        raise CommandError("standard input holds no token", "pipe it in")
    return token


def _show_run(run: Json) -> None:
    show_fields(
        [
            ("accepted", "yes" if run["accepted"] else "no"),
            ("subject", run["subject"]),
            ("tenant", run["tenant"]),
            ("roles", listing(run["roles"])),
            ("admin roles", listing(_held(each) for each in run["admin_roles"])),
        ]
    )
    rows = [(each["claim"], each["outcome"]) for each in run["claims"]]
    show_table(["CLAIM", "WHAT BECOMES OF IT"], rows, nothing="no claims could be read")


def _held(role: Json) -> str:
    return f"{role['role']} of {role['tenant']}" if role["tenant"] else str(role["role"])


def _keys_from(issuer: Json) -> str:
    if issuer["keys"]:
        return f"{len(issuer['keys'])} pinned"
    return str(issuer["jwks_url"]) if issuer["jwks_url"] else "discovery"


def _rule(rule: Json | None) -> str:
    if rule is None:
        return ""
    if "fixed" in rule:
        return f"always {rule['fixed']}"
    parts = [f"claim {rule['claim']}"]
    if rule.get("pattern"):
        parts.append(f"pattern {rule['pattern']}")
    if rule.get("map"):
        parts.append("map " + listing(f"{value} → {_told(meant)}" for value, meant in rule["map"].items()))
    if rule.get("prefix"):
        parts.append(f"prefix {rule['prefix']}")
    return ", ".join(parts)


def _told(meant: Any) -> str:
    if isinstance(meant, dict):
        return _held({"tenant": None, **meant})
    return " + ".join(meant) if isinstance(meant, list) else str(meant)


def _object(value: object) -> Json:
    return dict(value) if isinstance(value, dict) else {}
