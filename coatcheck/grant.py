"""`coatcheck grant …`: who may use which credential. Without a grant, a credential looks as if it did not exist."""

import time
from typing import Annotated, Any

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import WrongUsageError, done, invocation, listing, local_time, show_json, show_table
from coatcheck.times import moment_of

app = typer.Typer(help="Say who may use which credential.", no_args_is_help=True)


@app.command("add")
def add(
    context: typer.Context,
    credential: Annotated[str, typer.Argument(metavar="CREDENTIAL", show_default=False)],
    subject: Annotated[str | None, typer.Option(metavar="S", help="This subject.")] = None,
    role: Annotated[str | None, typer.Option(metavar="R", help="Every subject with this role.")] = None,
    client: Annotated[str | None, typer.Option(metavar="C", help="Only through this client.")] = None,
    method: Annotated[list[str] | None, typer.Option(metavar="M", help="Only this method. Repeatable.")] = None,
    path: Annotated[list[str] | None, typer.Option(metavar="P", help="Only under this path. Repeatable.")] = None,
    until: Annotated[str | None, typer.Option(metavar="T", help="8h, 7d, or a date.")] = None,
) -> None:
    """Let a subject, or everybody with a role, use a credential."""
    if (subject is None) == (role is None):
        raise WrongUsageError("a grant is for somebody; give either --subject S or --role R")
    fields: dict[str, Any] = {"credential": credential}
    fields |= {"subject": subject} if subject is not None else {"role": role}
    if client is not None:
        fields["client"] = client
    if method:
        fields["methods"] = [each.upper() for each in method]
    if path:
        fields["path_prefixes"] = path
    if until is not None:
        fields["until"] = moment_of(until, option="--until", now=time.time())
    with control_plane_of(context) as control_plane:
        grant = control_plane.add_grant(fields)
    if invocation(context).as_json:
        show_json(grant)
        return
    done(f"granted {credential} to {describe_holder(fields)} (grant {grant['id']})")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every grant."""
    with control_plane_of(context) as control_plane:
        grants = control_plane.grants()
    if invocation(context).as_json:
        show_json(grants)
        return
    show_table(
        ["ID", "CREDENTIAL", "FOR", "CLIENT", "METHODS", "PATHS", "UNTIL"],
        [
            (
                each["id"],
                each["credential"],
                describe_holder(each),
                each.get("client") or "any",
                listing(each.get("methods") or ["any"]),
                listing(each.get("path_prefixes") or ["any"]),
                local_time(each.get("until")),
            )
            for each in grants
        ],
        nothing="no grants; add one with 'coatcheck grant add CREDENTIAL --subject S'",
    )


@app.command("delete")
def delete(context: typer.Context, grant_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)]) -> None:
    """Withdraw a grant; placeholders that relied on it are refused from now on."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_grant(grant_id)
    done(f"withdrew grant {grant_id}")


def describe_holder(grant: Json) -> str:
    subject = grant.get("subject")
    return f"subject {subject}" if subject else f"role {grant.get('role')}"
