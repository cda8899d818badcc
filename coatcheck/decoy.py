"""`coatcheck decoy …`: placeholders that only ever alarm."""

from typing import Annotated

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import done, invocation, local_time, show_json, show_table

app = typer.Typer(help="Lay out placeholders that only ever alarm.", no_args_is_help=True)


@app.command("add")
def add(
    context: typer.Context,
    preset: Annotated[str | None, typer.Option(metavar="P", help="Looks like a key of this provider.")] = None,
    note: Annotated[str, typer.Option(help="Where you lay it, for yourself.")] = "",
) -> None:
    """Make one and print it as JSON: it is shown this once. Lay it where nobody but a thief looks."""
    fields: Json = {"note": note}
    if preset is not None:
        fields["preset"] = preset
    with control_plane_of(context) as control_plane:
        show_json(control_plane.add_decoy(fields))


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every decoy by its id; the strings themselves are not kept."""
    with control_plane_of(context) as control_plane:
        decoys = control_plane.decoys()
    if invocation(context).as_json:
        show_json(decoys)
        return
    show_table(
        ["ID", "LOOKS LIKE", "NOTE", "MADE", "USED"],
        [
            (
                each["id"],
                each["preset"],
                each["note"],
                local_time(each["created_at"]),
                local_time(each["used_at"]),
            )
            for each in decoys
        ],
        nothing="no decoys",
    )


@app.command("delete")
def delete(context: typer.Context, decoy_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)]) -> None:
    """Forget one: it alarms nobody any more."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_decoy(decoy_id)
    done(f"deleted {decoy_id}")
