"""Does a replay keep its schedule? Against a service in another process, on the cores that are here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.results import Outcome, Scale, Verdict, measurement
from benchmarks.service import serving
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.run.sender import Outcome as Sent
from tensorferry.replay.run.sender import Replay
from tensorferry.replay.workload.prepare import Prepared
from tensorferry.replay.workload.token_ids import TokenSource

_REQUESTS = 5000
_PER_S = 200
_SERVICE_MS = 30.0
_TOKENS = 1000  #: of each prompt
_START_S = 30.0
#: How late the machine wakes a process that does nothing but sleep: what no sender can be better than.
_SLEEPER = """
import sys, time
count, per_s = map(int, sys.argv[1:])
start, late = time.monotonic_ns(), []
for number in range(count):
    due = start + number * 10**9 // per_s
    while (left := due - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)  # what is measured: how late a sleeper wakes
    late.append((time.monotonic_ns() - due) / 1e6)
print(*late)
"""


def pacing(scale: Scale) -> Outcome:
    """How late each request was sent, in a run of 25 seconds."""
    count = max(scale.of(_REQUESTS), 2)
    with (
        TemporaryDirectory(prefix="ferry-") as folder,
        serving(Path(folder), _SERVICE_MS) as deployment,
        subprocess.Popen([sys.executable, "-c", _SLEEPER, str(count), str(_PER_S)], stdout=subprocess.PIPE) as sleeper,
    ):
        sent = asyncio.run(_replayed(deployment, count))
        slept, _ = sleeper.communicate(timeout=_START_S)
    asleep_ms = sorted(float(line) for line in slept.split())
    lateness_ms = sorted((one.sent_ns - one.intended_ns) / 1e6 for one in sent)
    service_ms = [(one.done_ns - one.sent_ns) / 1e6 for one in sent]
    last_ms = (sent[-1].sent_ns - sent[-1].intended_ns) / 1e6
    details = {**_tail(lateness_ms), "last_ms": last_ms}
    p99 = details["p99_ms"]
    found = (
        measurement("lateness of sending", "ms", lateness_ms, details=details),
        measurement("a process that only sleeps, beside it", "ms", asleep_ms, details=_tail(asleep_ms)),
        measurement(f"latency from the send; the service takes {_SERVICE_MS:g} ms", "ms", service_ms),
    )
    measured = scale.shrink == 1
    verdicts = (
        Verdict.of("the last send within 50 ms of its schedule", last_ms if measured else None, "<=", 50),
        Verdict.of("lateness at p99: at most 5 ms", p99 if measured else None, "<=", 5),
    )
    return Outcome("pacing", f"Replay {count:,} requests at {_PER_S}/s", found, verdicts)


def _tail(ordered: Sequence[float]) -> dict[str, float]:
    return {"p99_ms": ordered[-(-len(ordered) * 99 // 100) - 1], "max_ms": ordered[-1]}


async def _replayed(deployment: Deployment, count: int) -> list[Sent]:
    tokens = TokenSource(50_000, [], 0)
    requests = [
        Request(line=n + 1, at_ns=n * 10**9 // _PER_S, output_tokens=1, text_tokens=_TOKENS) for n in range(count)
    ]
    prepared = [Prepared(one, (), _TOKENS, np.asarray(tokens.ids(one, _TOKENS))) for one in requests]
    replay = Replay(prepared, tokens, Speed.parse("1"), deadline_s=_START_S)
    async with Client.connect(deployment, timeout_s=_START_S) as client:
        await replay.run(client)
    assert all(one.status == "ok" for one in replay.outcomes), replay.outcomes[0]
    return replay.outcomes
