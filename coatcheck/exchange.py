"""`coatcheck exchange`: what a runtime does for a session, done by hand (RFC 8693)."""

from typing import Annotated

import typer

from coatcheck.stack import control_plane_of
from coatcheck.state import SUBJECT
from coatcheck.terminal import WrongUsageError, invocation, show_json


def exchange(
    context: typer.Context,
    audience: Annotated[str, typer.Option(metavar="NAME", help="Credential name, provider or host.")],
    subject: Annotated[str, typer.Option(metavar="S", help="Whom the session acts for.")] = SUBJECT,
) -> None:
    """Exchange by hand: a session, and a placeholder for it.

    Prints the answer as JSON. It holds a live placeholder and a live proxy credential. The session stays open until it
    runs out.
    """
    if invocation(context).elsewhere is not None:
        raise WrongUsageError("an exchange by hand is the local stack's; docs/exchange.md has it by curl")
    with control_plane_of(context) as control_plane:
        session = control_plane.open_session(subject)
        show_json(control_plane.exchange(session["session_token"], audience).answer)
