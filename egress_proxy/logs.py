"""JSON lines on stderr: one for each refusal, and for what an operator should know. Never a secret or a placeholder."""

import asyncio
import logging
import sys
from types import TracebackType
from typing import Any

import structlog


def log_to_stderr(level: str) -> None:
    """Configure this process. Raises `ValueError` for a level nobody knows."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"COATCHECK_PROXY_LOG_LEVEL is one of debug, info, warning, error; not {level!r}")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """What nobody caught is named with its place. Not its message, which may quote what was being handled."""

    def log_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        structlog.get_logger("egress_proxy").error(
            "uncaught", what=context.get("message"), error=type(error).__name__, where=place_of(error)
        )

    loop.set_exception_handler(log_error)


def place_of(error: BaseException | None) -> str:
    """`file:line` where an exception was raised."""
    trace: TracebackType | None = error.__traceback__ if error is not None else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}" if trace is not None else ""
