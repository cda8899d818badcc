"""`coatcheck ca …`: our CA's certificate, for clients that cannot be told by a variable."""

import os
import sys
from typing import Annotated

import typer

from coatcheck.state import StateFolder
from coatcheck.terminal import CommandError, invocation
from coatcheck.trust import bundle

app = typer.Typer(help="Hand out our CA's certificate.", no_args_is_help=True)


@app.command("export")
def export(
    context: typer.Context,
    with_roots: Annotated[
        bool, typer.Option("--bundle", help="The system's roots too: what SSL_CERT_FILE needs.")
    ] = False,
) -> None:
    """Print the CA certificate that the proxy's leaves are signed by (PEM). Its key never leaves the state folder."""
    state = StateFolder(invocation(context).home)
    if not state.ca_certificate.exists():
        raise CommandError(
            f"there is no CA in {state.home} yet", "create it with 'coatcheck up', or name another --home"
        )
    text = bundle(state.ca_certificate, os.environ) if with_roots else state.ca_certificate.read_text()
    sys.stdout.write(text)
