"""Logs: one JSON object a line, on standard error.

Rule: a line names things; it never holds a token, a placeholder, an input or an answer. Libraries may say that
something happened, not what with: the arguments of their messages are dropped.
"""

import json
import logging
import sys
from datetime import UTC, datetime

import structlog

from control_plane.contract.placeholder import redact


def configure(level: str) -> None:
    """Sets up structlog and the standard library's logging for this process."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Terse())
    # Below WARNING the HTTP client logs whole URLs and headers.
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class _Terse(logging.Formatter):
    """A message's template without its arguments, an exception's type without its text."""

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
