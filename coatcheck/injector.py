"""`coatcheck injector …`: the proxies that registered. While there is one, no key is ever handed out itself."""

from typing import Annotated

import typer

from coatcheck.stack import control_plane_of
from coatcheck.terminal import done, invocation, local_time, show_json, show_table

app = typer.Typer(help="List registered proxies, and take one out.", no_args_is_help=True)


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every proxy that registered, and whether it is heard of."""
    with control_plane_of(context) as control_plane:
        injectors = control_plane.injectors()
    if invocation(context).as_json:
        show_json(injectors)
        return
    show_table(
        ["ID", "STATE", "REGISTERED", "LAST HEARD OF"],
        [
            (
                each["id"],
                "silent" if each["silent"] else "heard",
                local_time(each["registered_at"]),
                local_time(each["seen_at"]),
            )
            for each in injectors
        ],
        nothing="no proxy has registered",
    )


@app.command("remove")
def remove(context: typer.Context, injector: Annotated[str, typer.Argument(metavar="ID", show_default=False)]) -> None:
    """Take out one that is gone for good. One that still runs registers again."""
    with control_plane_of(context) as control_plane:
        control_plane.remove_injector(injector)
    done(f"removed {injector}")
