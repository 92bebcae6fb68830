"""The thread that sends spans to an OpenTelemetry receiver: no request waits for it."""

from __future__ import annotations

import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterable
from threading import Event, Thread

import structlog

from tensorferry import __version__
from tensorferry.codecs.errors import UNPLACED, ConfigError
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.pipeline.telemetry.span import Attributes, Span

log = structlog.get_logger()

MOST_WAITING = 4096  #: requests and calls whose spans are not sent yet, at most
MOST_AT_ONCE = 512  #: of these, in one message: about 1 KiB each
EVERY_S = 0.5  #: what came meanwhile goes together
CLOSE_S = 2.0  #: at the end, for what waits still to be sent

Made = Callable[[], Iterable[Span]]


def require_installed() -> None:
    """Raise ConfigError, naming the extra, where spans cannot be encoded."""
    try:
        there = importlib.util.find_spec("opentelemetry.proto.collector.trace.v1") is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        problem = "spans need a package that is not installed: pip install 'tensorferry[otel]', or leave the key away"
        raise ConfigError(UNPLACED, None, "telemetry.otlp_endpoint", problem)


class Exporter:
    """See the module. What the receiver does not take is dropped, and counted as `spans_lost`."""

    def __init__(self, deployment: Deployment, stage: str, rank: int, counters: Counters) -> None:
        """Of one process, to the receiver at `telemetry.otlp_endpoint`, be it there or not. Raises ConfigError."""
        require_installed()
        from tensorferry.pipeline.telemetry.otlp import Receiver

        assert deployment.telemetry.otlp_endpoint is not None
        resource: Attributes = {
            "service.name": "tensorferry",
            "service.version": __version__,
            "service.namespace": deployment.name,
            "service.instance.id": f"{stage}-{rank}",
            "process.pid": os.getpid(),
        }
        self._receiver = Receiver(deployment.telemetry.otlp_endpoint, resource)
        self._counters = counters
        self._waiting: deque[Made] = deque()
        self._closing = Event()
        self._failed = False
        self._thread = Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def take(self, made: Made) -> None:
        """Have the spans sent that `made` returns, which is called in the thread. Never waits."""
        if len(self._waiting) >= MOST_WAITING:
            self._counters.count("spans_lost")
        else:
            self._waiting.append(made)

    def close(self) -> None:
        """Send what waits, for `CLOSE_S` at most."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():  # a receiver that takes and does not answer; the thread ends with the process
            self._counters.count("spans_lost", len(self._waiting))
            log.warning("spans_not_sent", waiting=len(self._waiting))

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._send()
        self._send()
        self._receiver.close()

    def _send(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(MOST_AT_ONCE, len(self._waiting)))]
            try:
                refused = self._receiver.send(span for made in batch for span in made())
            except Exception as problem:  # whatever it is, later spans may go well, and no request is to notice
                self._counters.count("spans_lost", len(batch))
                if not self._failed:  # said once, until it works again
                    log.warning("spans_refused", kind=type(problem).__name__, problem=str(problem))
                self._failed = True
            else:
                self._counters.count("spans_lost", refused)
                self._failed = False
