"""The `coatcheck` command: every noun wired to its module, and the border at which each failure becomes one line.

Exit status: 0 done; 1 refused or failed, with one line on standard error that says why and what to do; 2 wrong usage;
`run` exits with CMD's own status. No traceback is ever shown: an error of ours names its type and place instead.
"""

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from coatcheck import (
    access,
    alarm,
    allow,
    audit,
    ca,
    client_commands,
    credential,
    decoy,
    grant,
    injector,
    issuer,
    kek,
    key,
    limit,
    placeholder,
    serve,
    source,
    tenant,
)
from coatcheck.doctor import doctor
from coatcheck.elsewhere import Elsewhere
from coatcheck.exchange import exchange
from coatcheck.explain import why
from coatcheck.run import run
from coatcheck.secret_input import NEVER_AN_ARGUMENT, OPTIONS_PEOPLE_TRY
from coatcheck.stack import down, status, up
from coatcheck.state import TENANT
from coatcheck.terminal import DEFAULT_HOME, CommandError, Invocation, WrongUsageError, complain

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it
READER_GONE: Final = 141  # 128 + SIGPIPE
_OURS: Final = ("coatcheck", "control_plane", "egress_proxy", "runtime")

_NO_SUCH_COMMAND: Final = re.compile(r"No such command '([^']*)'")
_COMMAND_WORD: Final = re.compile(r"[a-z]+(-[a-z]+){0,2}")

app = typer.Typer(
    name="coatcheck",
    help="Agents carry the ticket, never the key: run programs with placeholders instead of API keys.",
    no_args_is_help=True,
    epilog="Exit status: 0 done, 1 refused or failed, 2 wrong usage; 'run' exits with CMD's own.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    context: typer.Context,
    home: Annotated[
        Path, typer.Option(metavar="DIR", envvar="COATCHECK_HOME", help="The state folder.")
    ] = DEFAULT_HOME,
    as_json: Annotated[bool, typer.Option("--json", help="Print data as JSON.")] = False,
    control_plane: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="COATCHECK_URL", help="Not the local stack's control plane, but this one."),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="COATCHECK_ADMIN_TOKEN_FILE", help="With it: an administrator's token."),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="COATCHECK_CA_FILE", help="With it: whom to trust, else the system's."),
    ] = None,
    tenant: Annotated[
        str, typer.Option(metavar="T", envvar="COATCHECK_TENANT", help="Whose credentials, grants, limits, alarms.")
    ] = TENANT,
) -> None:
    context.obj = Invocation(
        home=Path(os.path.abspath(home.expanduser())),  # noqa: PTH100 - keeps symbolic links
        as_json=as_json,
        tenant=tenant,
        elsewhere=Elsewhere.asked_for(control_plane, admin_token_file, ca_file),
    )


_RUNNING: Final = "Run programs"
_CREDENTIALS: Final = "Credentials, and who may use them"
_WHO: Final = "Who may call, and whom to believe"
_LOOKING: Final = "Look and check"
_STACK: Final = "The local stack"
_PRODUCTION: Final = "Production"

app.command("run", rich_help_panel=_RUNNING, context_settings={"allow_interspersed_args": False})(run)
app.add_typer(credential.app, name="credential", rich_help_panel=_CREDENTIALS)
app.add_typer(grant.app, name="grant", rich_help_panel=_CREDENTIALS)
app.add_typer(allow.app, name="allow", rich_help_panel=_CREDENTIALS)
app.add_typer(placeholder.app, name="placeholder", rich_help_panel=_CREDENTIALS)
app.add_typer(limit.app, name="limit", rich_help_panel=_CREDENTIALS)
app.command("exchange", rich_help_panel=_CREDENTIALS)(exchange)
app.add_typer(tenant.app, name="tenant", rich_help_panel=_WHO)
app.add_typer(client_commands.app, name="client", rich_help_panel=_WHO)
app.add_typer(issuer.app, name="issuer", rich_help_panel=_WHO)
app.command("why", rich_help_panel=_LOOKING)(why)
app.add_typer(audit.app, name="audit", rich_help_panel=_LOOKING)
app.add_typer(access.app, name="access", rich_help_panel=_LOOKING)
app.add_typer(alarm.app, name="alarm", rich_help_panel=_LOOKING)
app.add_typer(decoy.app, name="decoy", rich_help_panel=_LOOKING)
app.command("doctor", rich_help_panel=_LOOKING)(doctor)
app.command("up", rich_help_panel=_STACK)(up)
app.command("down", rich_help_panel=_STACK)(down)
app.command("status", rich_help_panel=_STACK)(status)
app.add_typer(source.app, name="source", rich_help_panel=_CREDENTIALS)
app.add_typer(kek.app, name="kek", rich_help_panel=_STACK)
app.add_typer(ca.app, name="ca", rich_help_panel=_STACK)
app.add_typer(key.app, name="key", rich_help_panel=_PRODUCTION)
app.add_typer(injector.app, name="injector", rich_help_panel=_PRODUCTION)
app.add_typer(serve.app, name="serve", rich_help_panel=_PRODUCTION)


@app.command("demo", rich_help_panel=_RUNNING)
def demo() -> None:
    """Show the whole idea, each step verified on the wire."""
    from coatcheck.demo import show_demo  # the only one that needs certificates of its own

    show_demo()


def main() -> None:
    """The console script."""
    serve.start_over_isolated(sys.argv[1:])
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """One command; its exit status."""
    if any(not _is_text(argument) for argument in _read_by_us(arguments)):
        complain("an argument is not text (UTF-8); see 'coatcheck --help'")
        return WrongUsageError.exit_code
    if not _is_text(os.environ.get("COATCHECK_HOME", "")):
        complain("COATCHECK_HOME is not text (UTF-8); name another state folder")
        return WrongUsageError.exit_code
    try:
        result = app(args=json_first(arguments), prog_name="coatcheck", standalone_mode=False)
        sys.stdout.flush()
        if result == INTERRUPTED and sys.stderr.isatty():
            sys.stderr.write("\n")  # after the terminal's own ^C
        return result if isinstance(result, int) else 0
    except CommandError as error:
        complain(str(error))
        return error.exit_code
    except typer.TyperException as error:
        return _wrong_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has had enough; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception as error:
        complain(_unexpected(error))
        return 1


def _read_by_us(arguments: Sequence[str]) -> Sequence[str]:
    """All but CMD and its own arguments, which may be any bytes (names of files, say)."""
    if "run" not in arguments:
        return arguments
    own = list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)
    after_run = own.index("run") + 1 if "run" in own else len(own)
    return own if "--" in arguments else own[:after_run]


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:  # bytes that were not UTF-8 come as lone surrogates (PEP 383)
        return False
    return True


def json_first(arguments: Sequence[str]) -> list[str]:
    """`--json` is taken after the command too, except in `run`, where it may be CMD's own."""
    own = list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)
    rest = list(arguments[len(own) :])
    if "run" in own or "--json" not in own:
        return [*own, *rest]
    return ["--json", *(argument for argument in own if argument != "--json"), *rest]


def _wrong_usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.exit_code  # the help is printed already
    if context is not None and "missing command" in error.message.lower():
        context.get_help()  # prints it
        return error.exit_code
    path = context.command_path if context is not None else "coatcheck"
    if _was_a_secret(error, path):
        complain(NEVER_AN_ARGUMENT)
    else:
        complain(f"{_without_what_was_typed(error)}; see '{path} --help'")
    return error.exit_code


def _was_a_secret(error: typer.TyperException, path: str) -> bool:
    """Whether somebody gave a secret as an argument: then not even the message may repeat it."""
    if not path.startswith("coatcheck credential"):
        return False
    return getattr(error, "option_name", None) in OPTIONS_PEOPLE_TRY or "unexpected extra argument" in error.message


def _without_what_was_typed(error: typer.TyperException) -> str:
    """The message; a word that looks like no word of ours may be a secret in the wrong place, and is not repeated."""
    said = error.format_message().strip().rstrip(".")
    if said.lower().startswith("got unexpected extra"):
        return "there are more arguments than this command takes"
    typed = _NO_SUCH_COMMAND.match(error.message)
    if error.message.startswith("No such command") and not (typed and _COMMAND_WORD.fullmatch(typed[1])):
        return "no such command"
    return f"{said[:1].lower()}{said[1:]}"


def _unexpected(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    if type(error).__module__.partition(".")[0] in _OURS:
        return str(error)  # an error type of ours says what happened, and holds no secret
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_ours(frame.filename)]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    return f"an error of ours ({type(error).__name__} at {place}); please report it"


def _is_ours(file: str) -> bool:
    return any(f"/{package}/" in file for package in _OURS) and "site-packages" not in file
