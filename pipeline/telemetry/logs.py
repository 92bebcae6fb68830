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
    """Set up this process's log: one event a line, to stderr, with `bound` (stage, rank, ...) on every line.

    What libraries log with `logging`, from warnings up, becomes events too. The one set-up that is global.
    """

    def bind(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**bound, **event}  # not a context variable: threads of a pool have none

    if spec.log_format == "json":
        # Without locals, which structlog adds by default: they are users' prompts and images.
        traceback: Processor = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        rendering: list[Processor] = [traceback, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        rendering = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    sinks = _Sinks()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _Floods(),
            sinks.own_up,
            structlog.contextvars.merge_contextvars,
            bind,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _readable,
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[spec.log_level.upper()]),
        logger_factory=sinks,  # one write a line: processes share stderr
    )
    logging.lastResort = _Libraries(logging.WARNING)  # used where nobody has set up `logging`


class _Sinks:
    """The sink of what is stderr now."""

    def __init__(self) -> None:
        self._sink = Sink(sys.stderr)

    def __call__(self, *_: object) -> Sink:
        if self._sink.stream is not sys.stderr:
            self._sink = Sink(sys.stderr)
        return self._sink

    def own_up(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Say how many lines were lost before this one."""
        if self._sink.lost:
            event["lines_lost"] = self._sink.lost
        return event


class Ration:
    """Lets a few through each second, and says with the next how many it has left out."""

    LINES = 5
    SECONDS = 1.0

    def __init__(self) -> None:
        self._began, self._count = 0.0, 0

    def take(self) -> int | None:
        """How many were left out since the last one that was let through; None: this one is left out too."""
        now, left_out = time.monotonic(), 0
        if now - self._began >= self.SECONDS:
            left_out = max(0, self._count - self.LINES)
            self._began, self._count = now, 0
        self._count += 1
        return left_out if self._count <= self.LINES else None


class _Floods:
    """Lets a few warnings of a kind through each second, and says on the next how many it left out.

    What a hostile or broken peer sends is counted in full, but must not fill a disk.
    """

    def __init__(self) -> None:
        self._rations: defaultdict[str, Ration] = defaultdict(Ration)  # by event

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if event["level"] == "warning":
            left_out = self._rations[str(event["event"])].take()
            if left_out is None:
                raise structlog.DropEvent
            if left_out:
                event["left_out"] = left_out
        return event


def _readable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Bytes in hexadecimal; and nothing a peer said may end the line or steer the terminal."""
    for name, value in event.items():
        if isinstance(value, bytes | memoryview):
            event[name] = value.hex()
        elif isinstance(value, str) and not value.isprintable():
            event[name] = ascii(value)
    return event


class _Libraries(logging.Handler):
    """Logs what libraries log: asyncio of a task that failed, for one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = min(record.levelno // 10 * 10, logging.CRITICAL)
            text, problem = record.getMessage(), record.exc_info
            structlog.get_logger().log(level, "library_logged", library=record.name, text=text, exc_info=problem)
        except Exception:  # as every handler of `logging` does: a log line must not raise
            self.handleError(record)
