"""The counters and gauges of a process, served to Prometheus if a port is given.

They are served on loopback only, by each process on a port of its own: `telemetry.prometheus_port` plus the number of
the process. Tokenizers come first, then encoders, then schedulers, each by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING

from tensorferry.codecs.errors import DeploymentError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from tensorferry.pipeline.telemetry.prometheus import Exposition

#: Every counter, and its help text.
COUNTERS = {
    "requests_ok": "Requests answered with a result",
    "requests_failed": "Requests answered with an error",
    "requests_busy": "Requests not accepted because a limit was reached or the deployment drains",
    "requests_unrecorded": "Requests that are missing from the record of live traffic",
    "spans_lost": "Requests and encoder calls whose spans no receiver has taken",
    "requests_expired": "Requests that a scheduler gave up because they never became complete",
    "requests_abandoned": "Requests given up because their client was gone",
    "batches_abandoned": "Batches that no engine got because every request in them was over",
    "submits_repeated": "Submits of a request that was in flight or answered already",
    "items_sent_again": "Items sent to another encoder because their own had died or was silent",
    "requests_sent_again": "Times that a whole request was sent again, for example after its scheduler died",
    "answers_undeliverable": "Answers to clients that had left or did not keep up",
    "reports_late": "Reports about requests that were over, or from a rank that did not have them",
    "cancels_late": "Cancels of requests that were over, or of another client",
    "admits_late": "Requests that were over when a scheduler received them",
    "jobs_late": "Jobs of requests that were over when an encoder came to them",
    "batches_encoded_anew": "Batches that an encoder split and encoded again because a request in them failed",
    "embeddings_late": "Embeddings of requests that were over",
    "messages_refused": "Messages that did not decode, broke a limit, or came to the wrong stage",
    "connections_denied": "Connections refused before a message was read: unknown key, another's key, or none",
    "messages_unknown_peer": "Messages of lives, or about pools, that are not known here, or gainsay what is known",
    "consumers_refused": "Connections to a pool's broker that did not end in an admission",
    "scrapes_refused": "Connections to the metrics that were no valid request, closed early, silent, or too many",
    "messages_crashed": "Messages whose handling raised an unexpected error; each failed alone",
    "messages_stale_epoch": "Messages meant for an earlier life of this process",
    "plugin_blocks": "Times that a processor, adapter or engine held the event loop for 250 ms or longer",
    "plugin_blocked_ms": "Milliseconds for which these calls held the event loop, in all",
    "pool_waits": "Requests that waited for room in the pool",
    "growth_waits": "Requests that waited for an elastic pool to grow",
    "chunks_unmapped": "Times that a chunk of a peer's pool could not be mapped or unmapped",
    "pool_full_fallbacks": "Tensors sent inline because the pool had no room",
}

Labels = tuple[tuple[str, str], ...]  #: sorted by name


class Counters:
    """The counters and gauges of one process. Counting costs a dictionary update, also when Prometheus is off.

    Any thread may count.
    """

    def __init__(self, **labels: object) -> None:
        """labels: those of every metric, such as stage and rank."""
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
        """Set a gauge. name: letters, digits and underscores, and no name of COUNTERS."""
        assert name.isidentifier(), name
        assert name not in COUNTERS, name
        with self._lock:
            self._gauges[name, _sorted(labels)] = value

    def value(self, name: str, **labels: object) -> float:
        """Return a counter or gauge; 0 if it was never counted or set."""
        key = name, _sorted(labels)
        with self._lock:
            return self._counts.get(key, 0) if name in COUNTERS else self._gauges.get(key, 0.0)

    def serve(self, port: int) -> int:
        """Serve Prometheus on this loopback port (0: any free one) from a thread. Returns the port.

        Raises DeploymentError if the port is taken.
        """
        from prometheus_client import CollectorRegistry  # importing it takes 50 ms

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
        """Stop serving and free the port, which takes up to half a second if it served."""
        if self._exposition is not None:
            self._exposition.close()
            self._exposition = None

    def collect(self) -> Iterator[Metric]:
        """Yield every metric for Prometheus, named `tensorferry_...`."""
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


def _sorted(labels: dict[str, object]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items())) if labels else ()
