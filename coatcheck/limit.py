"""`coatcheck limit …`: how much of what may be used in a window of time."""

from typing import Annotated

import typer

from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import WrongUsageError, done, invocation, show_json, show_table
from coatcheck.times import seconds_of

app = typer.Typer(help="Limit requests and tokens.", no_args_is_help=True)


@app.command("add")
def add(
    context: typer.Context,
    per: Annotated[str, typer.Option(metavar="T", help="The window: seconds, or 1m, 1h, 1d.")],
    requests: Annotated[int | None, typer.Option(min=1, metavar="N", help="So many requests.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="So many tokens of models.")] = None,
    credential: Annotated[str | None, typer.Option(metavar="C", help="With this credential alone.")] = None,
    subject: Annotated[str | None, typer.Option(metavar="S", help="By this subject alone.")] = None,
    each_subject: Annotated[bool, typer.Option("--each-subject", help="Every subject has its own.")] = False,
) -> None:
    """Set a limit; proxies share it. Without --credential and --subject: all of the workspace together."""
    if (requests is None) == (tokens is None):
        raise WrongUsageError("give --requests or --tokens, one of them")
    if subject is not None and each_subject:
        raise WrongUsageError("give --subject or --each-subject, not both")
    fields: Json = {
        "measure": "requests" if requests is not None else "tokens",
        "amount": requests if requests is not None else tokens,
        "window_seconds": seconds_of(per, option="--per"),
        "each_subject": each_subject,
    }
    if credential is not None:
        fields["credential"] = credential
    if subject is not None:
        fields["subject"] = subject
    with control_plane_of(context) as control_plane:
        limit = control_plane.add_limit(fields)
    if invocation(context).as_json:
        show_json(limit)
        return
    done(f"limited to {_amount(limit)}: {limit['id']}")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every limit, and what was given out of it in the window that runs now."""
    with control_plane_of(context) as control_plane:
        limits = control_plane.limits()
    if invocation(context).as_json:
        show_json(limits)
        return
    show_table(
        ["ID", "LIMIT", "CREDENTIAL", "SUBJECT", "GIVEN OUT"],
        [
            (
                each["id"],
                _amount(each),
                each.get("credential") or "all",
                each.get("subject") or ("each" if each["each_subject"] else "all together"),
                each["granted"],
            )
            for each in limits
        ],
        nothing="no limits",
    )


@app.command("delete")
def delete(context: typer.Context, limit_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)]) -> None:
    """Take a limit away."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_limit(limit_id)
    done(f"deleted {limit_id}")


def _amount(limit: Json) -> str:
    return f"{limit['amount']} {limit['measure']} in {limit['window_seconds']} s"
