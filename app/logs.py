"""Logs: one JSON line an event, or lines for people; the standard library's records go the same way."""

import logging
import sys
import traceback
from typing import Any

import structlog

log = structlog.stdlib.get_logger("warmgate")


def configure(people: bool) -> None:
    """Send every log record to standard output, as JSON or as text."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    render = structlog.dev.ConsoleRenderer(colors=False) if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # Requests are counted in the metrics; a line for each would drown the events that matter.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.captureWarnings(True)


def frames(error: BaseException) -> list[str]:
    """Return where an exception arose, innermost last, and what caused it: places and kinds, no messages, no values."""
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    cause = error.__cause__ or error.__context__
    return places if cause is None else [*frames(cause), f"then {type(error).__name__}", *places]
