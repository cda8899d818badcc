"""`coatcheck key …`: the control plane's own keys, which sign session tokens and tag placeholders."""

import time
from typing import Annotated

import typer

from coatcheck.stack import control_plane_of
from coatcheck.terminal import WrongUsageError, done, invocation, local_time, show_json, show_table

app = typer.Typer(help="List and rotate the control plane's own keys.", no_args_is_help=True)

_PURPOSES = ("signing", "tag", "audit")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every key by its id, and what it is there for: published, in use, or kept for what it made."""
    with control_plane_of(context) as control_plane:
        keys = control_plane.keys()
    if invocation(context).as_json:
        show_json(keys)
        return
    show_table(
        ["ID", "PURPOSE", "STATE", "MADE", "IN USE FROM"],
        [
            (
                each["id"],
                each["purpose"],
                each["state"],
                local_time(each["created_at"]),
                local_time(each["in_use_from"] or each["created_at"]),
            )
            for each in keys
        ],
        nothing="no keys",
    )


@app.command("rotate")
def rotate(
    context: typer.Context,
    purpose: Annotated[str, typer.Argument(metavar="signing|tag|audit", show_default=False)],
    compromised: Annotated[
        bool, typer.Option("--compromised", help="The old keys go at once, with all that they made.")
    ] = False,
) -> None:
    """Make a new key. Everybody learns it before it is used, and the old one is kept while anything needs it."""
    if purpose not in _PURPOSES:
        raise WrongUsageError(f"there is no ring of keys of that name; there are {', '.join(_PURPOSES)}")
    with control_plane_of(context) as control_plane:
        key = control_plane.rotate_key(purpose, compromised=compromised)
    if invocation(context).as_json:
        show_json(key)
        return
    minutes = max(0, round((key["in_use_from"] - time.time()) / 60))
    done(f"made {key['id']}; it is in use {f'in {minutes} minutes' if minutes else 'now'}")
