"""What seeing costs: CPU of a request with metrics scraped and traffic recorded, and with spans sent too, over without.

Three deployments with adapters that do nothing are up, and take turns: off, on, spans; then spans, on, off; and so on.
What an arm spends in four turns and what `off` spends in those beside them are a pair, so a machine that gets busier
meets all of them. What is said is the mean of the ratios and differences, with t intervals over the pairs.

Against a deployment as it is by default, with its processor and model, the same difference is set: seeing a request
costs the same whatever is made of it, and beside a model's 90 ms the noise of a shared machine is larger than it.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.cpu import STAGES, START_S, pid_of, running
from benchmarks.results import Outcome, Scale, Verdict, measurement, quantile
from tensorferry.codecs.messages import Result
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.replay.results.confidence import Repeats

_IN_FLIGHT = 8
_SLICES = 4  #: of a turn, in which the arms alternate: others' work beside it comes and goes within a turn
_PHOTO = Path(__file__).parents[1] / "examples" / "images" / "coffee_exif_orientation6.jpg"
_MOST = 1.05  #: times the CPU without

DEPLOYMENT = """
name: overhead-%s
transport: shm
runtime_dir: {folder}/run
pool: {{budget_mb: 128}}
embeddings_pool: {{budget_mb: 32}}
%s
telemetry: {{%s}}
"""
_NOTHING = """
model: {{adapter: "benchmarks.plugins:NoAdapter"}}
tokenizer: {{processor: "benchmarks.plugins:NoProcessor"}}
"""
_DEFAULT = "model: {{adapter: patch-vit}}"
_REQUESTS, _DEFAULT_REQUESTS = 1024, 32  #: of a turn
ARMS = {
    "off": "log_level: info",
    "recording": "record: '{folder}/record.jsonl'",
    "metrics and recording": "prometheus_port: %(port)d, record: '{folder}/record.jsonl'",
    "metrics, recording and spans": "prometheus_port: %(port)d, record: '{folder}/record.jsonl', "
    "otlp_endpoint: 'http://127.0.0.1:%(sink)d'",
}
#: A receiver that takes all, in a process of its own. It says its port.
_SINK = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = HTTPServer(("127.0.0.1", 0), Sink)
print(server.server_port, flush=True)
server.serve_forever()
"""


class _Arm(NamedTuple):
    client: Client
    pids: Sequence[int]
    ports: Sequence[int]  #: of Prometheus

    def cpu_ms(self) -> float:
        return sum(map(_cpu_ms, self.pids))


def overhead(scale: Scale) -> Outcome:
    """One tokenizer, encoder and scheduler each; a sentence and a photo a request, eight in flight."""
    spent = asyncio.run(_measured(scale, _NOTHING, scale.of(_REQUESTS), ARMS))
    usual: Sequence[float] = ()
    if scale.shrink == 1:  # else it would load a model to measure nothing
        usual = asyncio.run(_measured(scale, _DEFAULT, _DEFAULT_REQUESTS, {"off": ARMS["off"]}))["off"]
    found, verdicts = [measurement("no-op adapters: off", "ms", spent["off"])], []
    for name in list(ARMS)[1:]:
        pairs = list(zip(spent[name], spent["off"], strict=True))
        times = Repeats(tuple(on / off for on, off in pairs)).estimate
        more_ms = Repeats(tuple(max(0.0, on - off) for on, off in pairs)).estimate
        details = {"times": times.value, "times_low": times.low or 0.0, "times_high": times.high or 0.0}
        details |= {"more_ms": more_ms.value, "more_high_ms": more_ms.high or 0.0}
        found.append(measurement(f"no-op adapters: {name}", "ms", spent[name], details=details))
        for kind, high in (
            ("as by default", None if more_ms.high is None or not usual else 1 + more_ms.high / quantile(usual, 0.5)),
            ("no-op adapters", times.high),
        ):
            measured = high if scale.shrink == 1 else None
            what = f"{kind}, {name}: upper bound over {len(pairs)} pairs, times the CPU without"
            verdicts.append(Verdict.of(what, measured, "<=", _MOST))
    if usual:
        found.append(measurement("as by default: off", "ms", usual))
    return Outcome("overhead", "CPU of a request over all stages", tuple(found), tuple(verdicts))


async def _measured(scale: Scale, keys: str, count: int, arms_of: Mapping[str, str]) -> dict[str, list[float]]:
    """Milliseconds of CPU a request, of each turn of so many, by arm."""
    spent: dict[str, list[float]] = {name: [] for name in arms_of}
    async with AsyncExitStack() as undo:
        sink = undo.enter_context(_sink())
        arms: dict[str, _Arm] = {}
        for number, (name, telemetry) in enumerate(arms_of.items()):
            folder = Path(undo.enter_context(TemporaryDirectory(prefix="ferry-")))
            port = _free_ports(len(STAGES))
            text = DEPLOYMENT % (number, keys, telemetry % {"port": port, "sink": sink})
            deployment = undo.enter_context(running(folder, text))
            client = await undo.enter_async_context(Client.connect(deployment, timeout_s=START_S))
            runtime = Runtime.of(deployment)
            ports = range(port, port + len(STAGES)) if "prometheus_port" in telemetry else ()
            arms[name] = _Arm(client, [pid_of(runtime, stage) for stage in STAGES], ports)
            await _turn(arms[name], count)
        for _ in range(max(1, scale.rounds // 4)):
            turns: dict[str, list[float]] = {name: [] for name in arms_of}
            for number in range(_SLICES):
                for name in arms if number % 2 == 0 else reversed(arms):
                    turns[name].append(await _turn(arms[name], -(-count // _SLICES)))
            for name, of_each in turns.items():
                spent[name].append(sum(of_each) / _SLICES)
    return spent


async def _turn(arm: _Arm, count: int) -> float:
    """Milliseconds of CPU a request, with one scrape of every process in it."""
    photo, free = _PHOTO.read_bytes(), asyncio.Semaphore(_IN_FLIGHT)

    async def request() -> None:
        async with free:
            outcome = await arm.client.submit(["What is in the picture? ", photo], output_tokens=16)
            if not isinstance(outcome, Result):
                raise RuntimeError(f"not a result: {outcome}")

    before = arm.cpu_ms()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(request())
        for port in arm.ports:
            tasks.create_task(asyncio.to_thread(_scrape, port))
    return (arm.cpu_ms() - before) / count


def _scrape(port: int) -> None:
    with closing(HTTPConnection("127.0.0.1", port, timeout=START_S)) as connection:
        connection.request("GET", "/metrics")
        assert b"tensorferry_in_flight" in connection.getresponse().read()


def _cpu_ms(pid: int) -> float:
    """CPU time of all threads of a process so far, to the nanosecond. Source: clock_getcpuclockid(3), whose clock of a
    process is its id, inverted, above three bits that say which time of it is meant."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e6


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has now."""
    for first in range(20_000, 60_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


@contextmanager
def _sink() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE) as sink:
        assert sink.stdout is not None
        try:
            yield int(sink.stdout.readline())
        finally:
            sink.kill()
