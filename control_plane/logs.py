"""Logs: one JSON object a line, on standard error.

Rule: a log line names things, it never holds a secret, a placeholder, a query string or a token. Other libraries'
loggers may say that something happened, not what with: their arguments are dropped.
"""

import json
import logging
import sys
from datetime import UTC, datetime

import structlog

from control_plane.contract.placeholder import redact


def configure(level: str) -> None:
    """Sets up all logging of this process: ours, and what other libraries say through the standard library."""
    configure_own(level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Terse())
    # Below WARNING, the database driver logs every statement with its parameters.
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def configure_own(level: str) -> None:
    """Sets up our own logs alone: for a program that runs us inside itself and has not done it."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),  # looked up late: others replace it
        cache_logger_on_first_use=False,
    )


class _Terse(logging.Formatter):
    """The template of a message without its arguments, and the type of an exception without its text."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "event": redact(str(record.msg))[:256],
            "logger": record.name,
            "level": record.levelname.lower(),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
        return json.dumps(line)
