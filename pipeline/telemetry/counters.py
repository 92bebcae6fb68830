"""What processes say of themselves: log lines, counters, and both for Prometheus where a port is given.

Metrics are served on loopback only, each process on a port of its own: `telemetry.prometheus_port` plus the number
of the process, tokenizers first, then encoders, then schedulers, each by rank.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.deployment.spec import TelemetrySpec
from tensorferry.pipeline.telemetry.log_sink import Sink

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from tensorferry.pipeline.telemetry.prometheus import Exposition

#: Every counter there is, and what it counts.
COUNTERS = {
    "requests_ok": "Requests answered with a result",
    "requests_failed": "Requests answered with an error",
    "requests_busy": "Requests not accepted because a limit was reached or the deployment drains",
    "requests_unrecorded": "Requests that are missing from the record of live traffic",
    "spans_lost": "Requests and encoder calls whose spans no receiver has taken",
    "requests_expired": "Requests a scheduler gave up because they never became complete",
    "requests_abandoned": "Requests given up because the client that had asked for them was gone",
    "batches_abandoned": "Batches an engine was spared because nobody waited for them any more",
    "submits_repeated": "Submits of a request that is in flight, or was answered, already",
    "items_sent_again": "Items sent to another encoder because theirs had died or fallen silent",
    "requests_sent_again": "Times that a request was sent again as a whole, such as after the death of its scheduler",
    "answers_undeliverable": "Answers to clients that had left or did not keep up",
    "reports_late": "Reports about requests that were over, or from who was not asked",
    "cancels_late": "Cancels of requests that were over, or of another client",
    "admits_late": "Requests that were over when a scheduler heard of them",
    "jobs_late": "Jobs of requests that were over when an encoder came to them",
    "batches_encoded_anew": "Batches that an encoder took apart because of a request that failed",
    "embeddings_late": "Embeddings of requests that were over",
    "messages_refused": "Messages that did not decode, broke a limit, or came to the wrong stage",
    "connections_denied": "Connections refused before a message was read: an unknown key, another's, or none",
    "messages_unknown_peer": "Messages of unknown peers or pools, or that contradict what is known of them",
    "consumers_refused": "Conversations about a pool that did not end in an admission",
    "scrapes_refused": "Connections to the metrics that were no request, hung up, were silent, or too many",
    "messages_crashed": "Messages that brought out a bug; each ended alone",
    "messages_stale_epoch": "Messages for a previous epoch of this process",
    "plugin_blocks": "Times that a processor, adapter or engine held the event loop for 250 ms or longer",
    "plugin_blocked_ms": "Milliseconds, of these times together, in which nothing else of the process could go on",
    "pool_waits": "Requests that waited for room in the pool",
    "growth_waits": "Requests that waited for an elastic pool to grow",
    "chunks_unmapped": "Times that a chunk of a peer's pool could not be mapped or unmapped",
    "pool_full_fallbacks": "Tensors sent inline because the pool had no room",
}

Labels = tuple[tuple[str, str], ...]  #: sorted by name


class Counters:
    """The counters and gauges of one process. Counting costs a dictionary update, whether or not anybody looks.

    Any thread may count: drafts are made off the event loop.
    """

    def __init__(self, **labels: object) -> None:
        """labels: what every metric carries, such as stage and rank."""
        self._labels = {name: str(value) for name, value in labels.items()}
        self._lock = Lock()
        self._counts: dict[tuple[str, Labels], int] = {(name, ()): 0 for name in COUNTERS}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._exposition: Exposition | None = None

    def count(self, name: str, by: int = 1, **labels: object) -> None:
        """name: one of COUNTERS. by: 0 or more."""
        assert name in COUNTERS, name
        assert by >= 0, by
        key = name, _sorted(labels)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + by

    def gauge(self, name: str, value: float, **labels: object) -> None:
        """Set a number that goes up and down. name: letters, digits and underscores, none of COUNTERS."""
        assert name.isidentifier(), name
        assert name not in COUNTERS, name
        with self._lock:
            self._gauges[name, _sorted(labels)] = value

    def value(self, name: str, **labels: object) -> float:
        """What a counter or gauge says now; 0: never counted or set."""
        key = name, _sorted(labels)
        with self._lock:
            return self._counts.get(key, 0) if name in COUNTERS else self._gauges.get(key, 0.0)

    def serve(self, port: int) -> int:
        """Answer Prometheus on this loopback port (0: any that is free), from a thread; returns the port.

        Raises DeploymentError when it is taken.
        """
        from prometheus_client import CollectorRegistry  # 50 ms that few processes need

        from tensorferry.pipeline.telemetry.prometheus import Exposition

        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._exposition = Exposition(registry, port, lambda: self.count("scrapes_refused"))
        except OSError as problem:
            raise DeploymentError(
                f"metrics cannot be served on 127.0.0.1:{port}: {problem.strerror}; change telemetry.prometheus_port"
            ) from None
        return self._exposition.port

    def close(self) -> None:
        """Stop serving; the port is free then. Takes up to half a second where it served."""
        if self._exposition is not None:
            self._exposition.close()
            self._exposition = None

    def collect(self) -> Iterator[Metric]:
        """For Prometheus: every metric, under `tensorferry_`."""
        from prometheus_client.metrics_core import Metric

        with self._lock:
            counts, gauges = list(self._counts.items()), list(self._gauges.items())
        families: dict[str, Metric] = {}
        for (name, labels), count in counts:
            family = families.setdefault(name, Metric(f"tensorferry_{name}", COUNTERS[name], "counter"))
            family.add_sample(f"tensorferry_{name}_total", self._labels | dict(labels), count)
        for (name, labels), value in gauges:
            family = families.setdefault(name, Metric(f"tensorferry_{name}", name.replace("_", " "), "gauge"))
            family.add_sample(f"tensorferry_{name}", self._labels | dict(labels), value)
        yield from families.values()


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


def _sorted(labels: dict[str, object]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items())) if labels else ()
