"""`coatcheck placeholder …`: what is in circulation, one more by hand, one less."""

import time
from typing import Annotated

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import done, invocation, local_time, show_json, show_table
from coatcheck.times import seconds_of

app = typer.Typer(help="List, issue and revoke placeholders.", no_args_is_help=True)


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every placeholder by its id; the placeholders themselves are not kept."""
    with control_plane_of(context) as control_plane:
        placeholders = control_plane.placeholders()
    if invocation(context).as_json:
        show_json(placeholders)
        return
    now = time.time()
    show_table(
        ["ID", "CREDENTIAL", "SUBJECT", "SESSION", "CLIENT", "STATE", "EXPIRES"],
        [
            (
                each["id"],
                each.get("credential"),
                each["subject"],
                each.get("session"),
                each["client"],
                _state(each, now),
                local_time(each["expires_at"]),
            )
            for each in placeholders
        ],
        nothing="no placeholders",
    )


@app.command("issue")
def issue(
    context: typer.Context,
    subject: Annotated[str, typer.Option(metavar="S")],
    audience: Annotated[str, typer.Option(metavar="A", help="Credential name, provider or host.")],
    ttl: Annotated[str, typer.Option(metavar="T", help="Seconds, or 15m, 8h.")],
    client: Annotated[str | None, typer.Option(metavar="C", help="For this client.")] = None,
    session: Annotated[bool, typer.Option(help="Bind it to a session of its own.")] = False,
) -> None:
    """Issue a placeholder by hand; print the answer as JSON. It is shown this once."""
    fields = {"subject": subject, "audience": audience, "ttl_seconds": seconds_of(ttl, option="--ttl")}
    if client is not None:
        fields["client"] = client
    if session:
        fields["session"] = True
    with control_plane_of(context) as control_plane:
        show_json(control_plane.issue_placeholder(fields))


@app.command("revoke")
def revoke(
    context: typer.Context, placeholder_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)]
) -> None:
    """Revoke a placeholder; streams that use it are cut."""
    with control_plane_of(context) as control_plane:
        control_plane.revoke_placeholder(placeholder_id)
    done(f"revoked {placeholder_id}")


def _state(placeholder: Json, now: float) -> str:
    if placeholder.get("revoked_at"):
        return "revoked"
    if (placeholder.get("suspended_until") or 0) > now:
        return "suspended"
    return "live" if placeholder["expires_at"] > now else "expired"
