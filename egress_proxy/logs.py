"""JSON lines on stderr: one for each refusal, and for what an operator should know. Never a secret or a placeholder."""

import logging
import sys

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
        cache_logger_on_first_use=True,
    )
