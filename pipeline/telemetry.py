"""What processes say of themselves: log lines, counters, and both for Prometheus where a port is given."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import structlog

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.config import TelemetrySpec

#: Every counter there is, and what it counts.
COUNTERS = {
    "requests_ok": "Requests answered with a result",
    "requests_failed": "Requests answered with an error",
    "requests_busy": "Requests not accepted because a limit was reached or the deployment drains",
    "requests_expired": "Requests a scheduler gave up because they never became complete",
    "submits_repeated": "Submits of a request that is in flight already",
    "answers_undeliverable": "Answers to clients that had left or did not keep up",
    "reports_late": "Reports about requests that were over",
    "embeddings_late": "Embeddings of requests that were over",
    "messages_refused": "Messages that did not decode, broke a limit, or came to the wrong stage",
    "mail_of_a_former_life": "Messages meant for an earlier life of this process",
    "pool_full_fallbacks": "Tensors sent inline because the pool had no room",
}


class Counters:
    """The counters and gauges of one process. Counting costs a dictionary update, whether or not anybody looks."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.gauges: dict[str, float] = {}
        self._server: Any = None

    def count(self, name: str, by: int = 1) -> None:
        """name: one of COUNTERS."""
        assert name in COUNTERS, name
        self.counts[name] += by

    def gauge(self, name: str, value: float) -> None:
        self.gauges[name] = value

    def serve(self, port: int) -> None:
        """Answer Prometheus on this loopback port, from a thread. Raises DeploymentError when it is taken."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as problem:
            raise DeploymentError(
                f"metrics cannot be served on 127.0.0.1:{port}: {problem.strerror}; change telemetry.prometheus_port"
            ) from None

    def collect(self) -> Iterator[Any]:
        """For Prometheus."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, count in list(self.counts.items()):
            yield CounterMetricFamily(f"tensorferry_{name}", COUNTERS[name], value=count)
        for name, value in list(self.gauges.items()):
            yield GaugeMetricFamily(f"tensorferry_{name}", name.replace("_", " "), value=value)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def configure(spec: TelemetrySpec, **bound: object) -> None:
    """Set up this process's log, once: one event a line, to stderr, with `bound` on every line."""
    renderer: structlog.typing.Processor
    if spec.log_format == "json":
        renderer = structlog.processors.JSONRenderer()
        tracebacks: structlog.typing.Processor = structlog.processors.dict_tracebacks
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        tracebacks = structlog.processors.StackInfoRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[spec.log_level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**bound)
