"""What people and scripts get to see: tables, JSON, and one helpful line when something fails.

Rule: data goes to standard output, everything else to standard error. Text that came from outside (a path in the audit
trail, a name in an answer) is made printable first, so that no request can write escape sequences to a terminal.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from coatcheck.elsewhere import Elsewhere

_UNWRAPPED_COLUMNS: Final = 10_000
"""Standard output that is no terminal is never wrapped or cut: other programs read it."""


class CommandError(Exception):
    """The command failed or was refused: what happened, and what to do. Exit status 1."""

    exit_code = 1

    def __init__(self, happened: str, todo: str = "") -> None:
        super().__init__(f"{happened}; {todo}" if todo else happened)


class WrongUsageError(CommandError):
    """The command line itself makes no sense. Exit status 2."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Invocation:
    """What the options before the command said."""

    home: Path
    as_json: bool
    tenant: str
    elsewhere: "Elsewhere | None"
    """The control plane to talk to; None: the one of the local stack."""


DEFAULT_HOME: Final = Path("~/.coatcheck")


def typed(home: Path, command: str) -> str:
    """A command as somebody with this state folder has to type it."""
    if home == DEFAULT_HOME.expanduser():
        return command
    return command.replace("coatcheck ", f"coatcheck --home {shlex.quote(str(home))} ")


def invocation(context: typer.Context) -> Invocation:
    found = context.find_root().obj
    assert isinstance(found, Invocation)
    return found


def printable(untrusted: object) -> str:
    """`untrusted` as one line of text without control characters (escape sequences, line breaks, bidi overrides)."""
    text = str(untrusted)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def output() -> Console:
    """Standard output. Markup is off: nothing printed here is ever read as formatting."""
    width = None if sys.stdout.isatty() else _UNWRAPPED_COLUMNS
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)


def messages() -> Console:
    """Standard error."""
    width = None if sys.stderr.isatty() else _UNWRAPPED_COLUMNS
    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False, width=width)


def say(line: str) -> None:
    """One line to standard error, beginning with our name."""
    messages().print(Text("coatcheck: ", style="bold").append(printable(line), style="not bold"), soft_wrap=True)


def complain(error: str) -> None:
    messages().print(
        Text("coatcheck: ", style="bold red").append(printable(error), style="not bold default"), soft_wrap=True
    )


def done(line: str) -> None:
    """What a command that prints no data did, to standard error."""
    messages().print(Text(printable(line)), soft_wrap=True)


def show_json(data: Any) -> None:
    """One JSON document. ASCII only, so that a terminal cannot be written to by what is in it."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=True) + "\n")


def show_json_line(data: Any) -> None:
    sys.stdout.write(json.dumps(data, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, nothing: str) -> None:
    """Aligned columns; `nothing` (to standard error) when there is no row."""
    rows = list(rows)
    if not rows:
        done(nothing)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*(Text("—" if cell in (None, "") else printable(cell)) for cell in row))
    _print_plain(table)


def show_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Names and values, one a line; values that are empty are left out."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        if value not in (None, "", []):
            table.add_row(name, Text(printable(value)))
    _print_plain(table)


def _print_plain(table: Table) -> None:
    if sys.stdout.isatty():
        output().print(table)
        return
    console = output()
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def local_time(unix_seconds: float | None) -> str:
    """As the machine's clock shows it; a moment that no calendar holds is shown as the number it is."""
    if unix_seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(unix_seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:g} s after 1970"


def listing(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)
