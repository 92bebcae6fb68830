"""The log of a process: one event a line on stderr, as JSON or for a console."""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

from tensorferry.pipeline.deployment.spec import TelemetrySpec
from tensorferry.pipeline.telemetry.log_sink import Sink


def configure(spec: TelemetrySpec, **bound: object) -> None:
    """Set up this process's log: one event a line, on stderr, with `bound` (stage, rank, ...) on every line.

    Records of `logging` from warnings up become events `library_log`. This changes global state of the process.
    """

    def bind(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**bound, **event}  # threads of a pool would not have a context variable

    if spec.log_format == "json":
        # structlog adds local variables by default, but they contain users' prompts and images.
        traceback: Processor = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        rendering: list[Processor] = [traceback, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        rendering = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    sinks = _Sinks()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _RateLimit(),
            sinks.report_lost_lines,
            structlog.contextvars.merge_contextvars,
            bind,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _readable,
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[spec.log_level.upper()]),
        logger_factory=sinks,  # one write a line, because processes share stderr
    )
    logging.lastResort = _Libraries(logging.WARNING)  # used unless `logging` is set up


class _Sinks:
    """The sink of the current stderr."""

    def __init__(self) -> None:
        self._sink = Sink(sys.stderr)

    def __call__(self, *_: object) -> Sink:
        if self._sink.stream is not sys.stderr:
            self._sink = Sink(sys.stderr)
        return self._sink

    def report_lost_lines(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Add the number of lines that were lost before this one."""
        if self._sink.lost:
            event["lines_lost"] = self._sink.lost
        return event


class Ration:
    """Lets a few events through each second, and counts the events that it suppresses."""

    LINES = 5
    SECONDS = 1.0

    def __init__(self) -> None:
        self._began, self._count = 0.0, 0

    def take(self) -> int | None:
        """Return the number suppressed since the last event that was let through; None if this event is suppressed."""
        now, suppressed = time.monotonic(), 0
        if now - self._began >= self.SECONDS:
            suppressed = max(0, self._count - self.LINES)
            self._began, self._count = now, 0
        self._count += 1
        return suppressed if self._count <= self.LINES else None


class _RateLimit:
    """Lets a few warnings of each event through a second; the next one has the number that was suppressed.

    Counters count every message of a hostile or broken peer, but its log lines must not fill a disk.
    """

    def __init__(self) -> None:
        self._rations: defaultdict[str, Ration] = defaultdict(Ration)  # by event

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if event["level"] == "warning":
            suppressed = self._rations[str(event["event"])].take()
            if suppressed is None:
                raise structlog.DropEvent
            if suppressed:
                event["suppressed"] = suppressed
        return event


def _readable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Show bytes in hexadecimal, and escape text that could end the line or control the terminal."""
    for name, value in event.items():
        if isinstance(value, bytes | memoryview):
            event[name] = value.hex()
        elif isinstance(value, str) and not value.isprintable():
            event[name] = ascii(value)
    return event


class _Libraries(logging.Handler):
    """Logs the records of libraries, such as asyncio's of a failed task."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = min(record.levelno // 10 * 10, logging.CRITICAL)
            text, problem = record.getMessage(), record.exc_info
            structlog.get_logger().log(level, "library_log", library=record.name, text=text, exc_info=problem)
        except Exception:  # as every handler of `logging` does, because logging must not raise
            self.handleError(record)
