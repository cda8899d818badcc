"""`coatcheck tenant …`: the isolation units of a control plane."""

import sys
from typing import Annotated

import typer

from coatcheck.stack import control_plane_of
from coatcheck.terminal import CommandError, done, invocation, local_time, say, show_json, show_table

app = typer.Typer(help="Make, list and delete tenants.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


@app.command("add")
def add(context: typer.Context, name: Name) -> None:
    """Make a tenant. One that is there already stays as it is."""
    with control_plane_of(context) as control_plane:
        made = control_plane.add_tenant(name)
    if invocation(context).as_json:
        show_json(made)
        return
    done(f"tenant {made['id']} is there")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every tenant."""
    with control_plane_of(context) as control_plane:
        tenants = control_plane.tenants()
    if invocation(context).as_json:
        show_json(tenants)
        return
    rows = [(each["id"], local_time(each["created_at"])) for each in tenants]
    show_table(["TENANT", "MADE"], rows, nothing="no tenants; make one with: coatcheck tenant add NAME")


@app.command("delete")
def delete(
    context: typer.Context,
    name: Name,
    with_everything: Annotated[
        bool, typer.Option("--yes", "--with-everything", help="Yes: its credentials, grants and sessions too.")
    ] = False,
) -> None:
    """Delete a tenant with everything it has. The audit trail stays. Asks first, at a terminal."""
    if not with_everything and sys.stdin.isatty():
        say(f"this deletes the credentials, grants and sessions of {name} too")
        with_everything = typer.prompt("type the tenant's name to go on", err=True) == name
    if not with_everything:
        raise CommandError("deleting a tenant deletes its credentials, grants and sessions too", "say so with --yes")
    with control_plane_of(context) as control_plane:
        control_plane.delete_tenant(name)
    done(f"deleted tenant {name} with everything it had; its audit trail stays")
