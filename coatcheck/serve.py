"""`coatcheck serve …`: one production process, configured by `COATCHECK_*` alone. The image's entry points.

Rule: a setting that is missing, wrong or unknown stops the start with one line that names it; values are never shown.
"""

import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from coatcheck.terminal import CommandError
from runtime.core.ambient import scrubbed

if TYPE_CHECKING:
    from pydantic import ValidationError

Settings = TypeVar("Settings")

app = typer.Typer(help="Run one process, configured by COATCHECK_*.", no_args_is_help=True)


@app.command("control-plane")
def control_plane() -> None:
    """The control plane (COATCHECK_CONTROL_PLANE_*)."""
    from control_plane import bootstrap, config

    _serve(lambda: config.Settings.from_environment(os.environ), bootstrap.serve, prefix=config.PREFIX)


@app.command("migrate")
def migrate() -> None:
    """Bring the control plane's database to the tables of this release, and end (COATCHECK_CONTROL_PLANE_*)."""
    from control_plane import bootstrap, config

    _serve(lambda: config.DatabaseSettings.from_environment(os.environ), bootstrap.migrate, prefix=config.PREFIX)


@app.command("proxy")
def proxy() -> None:
    """The egress proxy (COATCHECK_PROXY_*)."""
    from egress_proxy import bootstrap, config

    _serve(config.settings_from_environment, bootstrap.serve, prefix=config.PREFIX)


@app.command("runtime")
def runtime() -> None:
    """The runtime (COATCHECK_RUNTIME_*)."""
    try:
        from runtime import bootstrap, config
    except ImportError:
        raise CommandError("this release has no runtime process yet", "serve the control plane and the proxy") from None

    _serve(config.settings_from_environment, bootstrap.serve, prefix=config.PREFIX)


def start_over_isolated(arguments: Sequence[str]) -> None:
    """A process that serves holds keys: it takes no module, option or hook from `PYTHON*` variables, from the current
    folder or from its user's site-packages (`python -I`). The runtime has no credential of the environment either, not
    even in `/proc/<pid>/environ`, which keeps what a process was started with. Where this one would, it starts over;
    else this returns. The image's entry point is isolated from the beginning."""
    if not is_serving(arguments):
        return
    environment = scrubbed(os.environ) if _is_runtime(arguments) else dict(os.environ)
    if sys.flags.isolated and environment == dict(os.environ):
        return
    os.execve(sys.executable, [sys.executable, "-I", "-m", "coatcheck", *arguments], environment)  # noqa: S606 - ourselves


def _is_runtime(arguments: Sequence[str]) -> bool:
    return any(pair == ("serve", "runtime") for pair in pairwise(arguments))


def is_serving(arguments: Sequence[str]) -> bool:
    """Whether it is `serve PART` that is asked for, and not its help."""
    parts = {str(command.name) for command in app.registered_commands}
    return any(one == "serve" and other in parts for one, other in pairwise(arguments))


def _serve(
    read_settings: Callable[[], Settings], serve: Callable[[Settings], Coroutine[Any, Any, None]], *, prefix: str
) -> None:
    import uvloop
    from pydantic import ValidationError

    try:
        settings = read_settings()
    except ValidationError as error:
        raise CommandError(wrong_settings(error, prefix=prefix), "correct the environment and start again") from None
    except ValueError as error:  # an unknown name; the message has the one that was probably meant
        raise CommandError(str(error), "correct the environment and start again") from None
    uvloop.run(serve(settings))


def wrong_settings(error: "ValidationError", *, prefix: str) -> str:
    """Every wrong setting with what is wrong about it, never with its value."""
    return "; ".join(
        _wrong_setting(problem, prefix=prefix)
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _wrong_setting(problem: Any, *, prefix: str) -> str:
    said = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        said = "is not set"
    if not problem["loc"]:
        return str(said)  # of several settings together: the message names them
    return f"{prefix}{str(problem['loc'][0]).upper()} {said[0].lower()}{said[1:]}"
