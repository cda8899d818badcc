"""`coatcheck alarm …`: placeholders that were seen in the wrong hands, and who is told."""

from typing import Annotated

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import done, invocation, listing, local_time, show_fields, show_json, show_table

app = typer.Typer(help="See alarms, and say where they are told.", no_args_is_help=True)


@app.command("list")
def list_(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--lines", "-n", min=1, max=1000, help="How many of the newest.")] = 100,
) -> None:
    """The newest alarms: which placeholder, who had it, who was told."""
    with control_plane_of(context) as control_plane:
        alarms = control_plane.alarms(limit=limit)
    if invocation(context).as_json:
        show_json(alarms)
        return
    show_table(
        ["WHEN", "WHAT", "PLACEHOLDER", "CREDENTIAL", "SEEN WITH", "AT", "TIMES", "TOLD"],
        [
            (
                local_time(each["last_at"]),
                each["kind"] + (", revoked" if each["revoked"] else ""),
                each["placeholder_id"],
                each["credential"],
                _caller(each),
                each["host"],
                each["count"],
                listing(_told(delivery) for delivery in each["deliveries"]),
            )
            for each in alarms
        ],
        nothing="no alarms",
    )


@app.command("test")
def test(context: typer.Context) -> None:
    """Raise an alarm that is none, to see that it arrives."""
    with control_plane_of(context) as control_plane:
        alarm = control_plane.test_alarm()
        hooks = control_plane.alarm_hooks()
    if invocation(context).as_json:
        show_json(alarm)
        return
    told = f"{len(hooks)} hooks are told" if hooks else "nobody is told: 'coatcheck alarm add-hook URL'"
    done(f"raised {alarm['id']}; {told}; see 'coatcheck alarm list'")


@app.command("settings")
def settings(
    context: typer.Context,
    revoke_on_mismatch: Annotated[
        bool | None,
        typer.Option(help="Revoke a placeholder that another caller of this workspace uses."),
    ] = None,
) -> None:
    """What is done because of an alarm."""
    with control_plane_of(context) as control_plane:
        if revoke_on_mismatch is None:
            found = control_plane.alarm_settings()
        else:
            found = control_plane.change_alarm_settings({"revoke_on_mismatch": revoke_on_mismatch})
    if invocation(context).as_json:
        show_json(found)
        return
    show_fields([("revoke on mismatch", "yes" if found["revoke_on_mismatch"] else "no")])


@app.command("add-hook")
def add_hook(context: typer.Context, url: Annotated[str, typer.Argument(metavar="URL", show_default=False)]) -> None:
    """Tell alarms there, by POST; print its secret, which signs them. It is shown this once."""
    with control_plane_of(context) as control_plane:
        show_json(control_plane.add_alarm_hook(url))


@app.command("list-hooks")
def list_hooks(context: typer.Context) -> None:
    """Where alarms are told."""
    with control_plane_of(context) as control_plane:
        hooks = control_plane.alarm_hooks()
    if invocation(context).as_json:
        show_json(hooks)
        return
    show_table(
        ["ID", "URL", "SINCE"],
        [(each["id"], each["url"], local_time(each["created_at"])) for each in hooks],
        nothing="alarms are told nowhere but in the trail and the log",
    )


@app.command("delete-hook")
def delete_hook(
    context: typer.Context, hook_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)]
) -> None:
    """Tell alarms there no longer."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_alarm_hook(hook_id)
    done(f"deleted {hook_id}")


def _caller(alarm: Json) -> str:
    caller = alarm["caller"]
    if caller is None:
        return "a caller of another workspace"
    return listing(caller[name] for name in ("client", "subject", "session") if caller[name])


def _told(delivery: Json) -> str:
    if delivery["delivered"]:
        return f"{delivery['hook']} told"
    return f"{delivery['hook']} {'given up' if delivery['given_up'] else 'not yet'} ({delivery['error'] or 'waiting'})"
