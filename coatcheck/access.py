"""`coatcheck access …`: who can use what, when it was last used, and what one request would get."""

from typing import Annotated, Any, Final

import typer

from coatcheck.client import Json
from coatcheck.credential import read_placements
from coatcheck.stack import control_plane_of
from coatcheck.state import SUBJECT
from coatcheck.terminal import WrongUsageError, invocation, listing, local_time, printable, show_json, show_table
from control_plane.contract.placement import placement_to_json

app = typer.Typer(help="See who can use what, and try a request without making it.", no_args_is_help=True)

_MARKS: Final = {"passed": "ok", "refused": "NO", "not_reached": "-", "not_asked": "-"}
_REFUSED: Final = 1


@app.command("list")
def list_(
    context: typer.Context,
    subject: Annotated[str | None, typer.Option(metavar="S", help="What this subject can use.")] = None,
) -> None:
    """Who can use which credential, where, through what, and when it was last used."""
    with control_plane_of(context) as control_plane:
        entitlements = control_plane.access(subject)
    if invocation(context).as_json:
        show_json(entitlements)
        return
    show_table(
        ["WHO", "CREDENTIAL", "WHERE", "CLIENT", "METHODS", "PATHS", "STATE", "LAST USED"],
        [
            (
                each["subject"] or f"role {each['role']}",
                each["credential"],
                listing(each["destinations"]),
                each["client"],
                listing(each["methods"] or []),
                listing(each["path_prefixes"] or []),
                _state(each),
                local_time(each["last_used_at"]) if each["last_used_at"] is not None else "never",
            )
            for each in entitlements
        ],
        nothing="nobody can use anything",
    )


@app.command("check")
def check(
    context: typer.Context,
    method: Annotated[str, typer.Argument(metavar="METHOD", show_default=False)],
    url: Annotated[str, typer.Argument(metavar="URL", show_default=False)],
    subject: Annotated[str, typer.Option(metavar="S", help="Who would ask.")] = SUBJECT,
    credential: Annotated[
        str | None, typer.Option(metavar="NAME", help="With this credential; else without any.")
    ] = None,
    client: Annotated[str | None, typer.Option(metavar="C", help="Through this client.")] = None,
    role: Annotated[list[str] | None, typer.Option(metavar="R", help="In this role; repeatable.")] = None,
    scope: Annotated[str, typer.Option(metavar="SCOPE", help="With a placeholder of this scope.")] = "",
    header: Annotated[
        str | None,
        typer.Option(metavar="'N: F'", help="The placeholder stands in this header, such as 'X-Key: {secret}'."),
    ] = None,
    basic: Annotated[str | None, typer.Option(metavar="USER", help="It is the password of Basic.")] = None,
    query: Annotated[str | None, typer.Option(metavar="PARAM", help="It is in this query parameter.")] = None,
    path: Annotated[str | None, typer.Option(metavar="FORMAT", help="It is this segment of the path.")] = None,
    websocket: Annotated[bool, typer.Option("--websocket", help="The request would open a WebSocket.")] = False,
    other_key: Annotated[
        bool, typer.Option("--other-key", help="It would carry a key of its own, in whatever field.")
    ] = False,
) -> int:
    """What one request would get, step by step, without making it. Status 1 where it would be refused."""
    fields: dict[str, Any] = {"method": method.upper(), "url": url, "subject": subject, "roles": role or []}
    if scope:
        fields["scope"] = scope
    for name, value in (("credential", credential), ("client", client)):
        if value is not None:
            fields[name] = value
    placements = read_placements(
        **{
            name: [value] if value is not None else None
            for name, value in (("header", header), ("basic", basic), ("query", query), ("path", path))
        }
    )
    if len(placements) > 1:
        raise WrongUsageError("a placeholder stands in one place: one of --header, --basic, --query and --path")
    if placements:
        fields["placement"] = placement_to_json(placements[0])
    fields |= {name: True for name, given in (("websocket", websocket), ("other_key", other_key)) if given}
    with control_plane_of(context) as control_plane:
        answer = control_plane.check_access(fields)
    if invocation(context).as_json:
        show_json(answer)
    else:
        _show(answer)
    return 0 if answer["allowed"] else _REFUSED


def _show(answer: Json) -> None:
    show_table(
        ["STEP", "", "WHY"],
        [(each["step"], _MARKS[each["outcome"]], each["detail"]) for each in answer["steps"]],
        nothing="",
    )
    if answer["traits"]:
        typer.echo(printable(f"its destination: {', '.join(answer['traits'])}"))
    verdict = f"refused: {answer['detail']} ({answer['code']})"
    if answer["allowed"]:
        verdict = "allowed" if answer["credential"] else "allowed, without any credential: --credential tries one"
    typer.echo(printable(verdict if not answer["hint"] else f"{verdict}; {answer['hint']}"))


def _state(entitlement: Json) -> str:
    return "live" if entitlement["live"] else "over"
