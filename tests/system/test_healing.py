"""A process that dies under load is started again, what it had is sent again, and every request ends in one result."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.faults import sever
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.channels.channels import Dealer, open_context
from tensorferry.pipeline.client.client import Client, Outcome
from tensorferry.pipeline.client.prompt_parts import Embeddings
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.assignment import assign

PROGRAMS = Path(__file__).parents[1] / "programs"
START_S = 60.0
PATIENCE_S = 40.0
ROWS_GATED, ROWS_LETHAL = 11, 17  #: of an item that the odd adapter waits at, or dies of

pytestmark = pytest.mark.timeout(120)

DEPLOYMENT = """
name: healing-test
transport: {transport}
runtime_dir: {folder}/run
model: {{adapter: "odd_adapter:Odd", options: {{gate: {folder}/gate}}}}
tokenizer: {{workers: {tokenizers}, threads: 1{processor}}}
encoder: {{ranks: {encoders}, batch_patches: 0}}
scheduler:
  {{groups: {groups}, tp_size: {tp_size}, attention_tp_size: {tp_size}, batch_tokens: {batch_tokens},
    options: {{digests: true, service_ms: {service_ms}}}}}
pool: {{budget_mb: 16, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 16, inline_below_kb: 0}}
limits: {{request_timeout_s: {request_timeout_s}}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: {quarantine_s}}}
telemetry: {{log_level: error, log_format: json}}
"""


@dataclass
class Running:
    """A deployment, with a client."""

    deployment: Deployment
    supervisor: Supervisor
    client: Client
    gate: Path

    def submit(self, request: bytes | None = None, rows: int = 4) -> asyncio.Future[Outcome]:
        return self.client.submit_nowait([image(rows)], request=request, deadline_s=PATIENCE_S)

    async def stop(self, stage: str, rank: int) -> None:
        pid = self.supervisor.processes[stage, rank]
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def kill(self, stage: str, rank: int) -> int:
        pid = self.supervisor.processes[stage, rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    async def lives_again(self, stage: str, rank: int, pid: int) -> None:
        """Until a next life is ready, for the tokenizers too."""
        await eventually(lambda: self.supervisor.processes[stage, rank] != pid)
        await eventually(lambda: self.supervisor.is_ready(stage, rank))
        await self.all_live()

    async def all_live(self) -> None:
        await self.until_members(lambda members: {member.state for member in members} == {"ready"})

    async def lends(self, name: str, slots: int) -> None:
        """Until a process has lent so much of its pool, or more."""
        await self.until_members(
            lambda members: any(
                gauge.value >= slots
                for member in members
                for gauge in member.gauges
                if (f"{member.stage}-{member.rank}", gauge.name) == (name, "pool_lent_slots")
            )
        )

    async def owns(self, requests: int) -> None:
        """Until the tokenizers together own so many requests."""
        await self.until_members(
            lambda members: (
                requests
                == sum(
                    gauge.value
                    for member in members
                    for gauge in member.gauges
                    if (member.stage, gauge.name) == ("tokenizer", "in_flight")
                )
            )
        )

    async def gives_all_back(self) -> None:
        """Until no pool has lent anything."""
        await self.until_members(
            lambda members: (
                not any(gauge.value for member in members for gauge in member.gauges if gauge.name == "pool_lent_slots")
            )
        )

    async def until_members(self, condition: Callable[[list[wire.Member]], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(await self.client.refresh(PATIENCE_S)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
def run(may_start_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=os.pathsep)

    @asynccontextmanager
    async def running(**settings: object) -> AsyncIterator[Running]:
        usual = dict(
            transport="shm",
            tokenizers=1,
            encoders=1,
            groups=1,
            tp_size=1,
            batch_tokens=65536,
            service_ms=0,
            quarantine_s=20.0,
            processor="",
            request_timeout_s=60.0,
        )
        file = tmp_path / "deployment.yaml"
        file.write_text(DEPLOYMENT.format(folder=folder, **usual | settings))
        deployment = load(file)
        async with (
            Supervisor.running(deployment, file) as supervisor,
            Client.connect(deployment, timeout_s=START_S) as client,
        ):
            yield Running(deployment, supervisor, client, Path(folder) / "gate")

    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield running
        assert not list((Path(folder) / "run").glob("*/*")), "something is left"


def image(rows: int) -> bytes:
    """A picture that becomes so many rows of embeddings: 28 x 28 pixels each."""
    pixels = np.random.default_rng(rows).integers(0, 256, (28, 28 * rows, 3), dtype=np.uint8)
    with BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


def embeddings(number: int) -> tuple[Embeddings, bytes]:
    """An item as the adapter makes it, encoded by nobody, and what the engine reports of it."""
    digest = np.random.default_rng(number).integers(0, 256, 32, np.uint8)
    rows = np.broadcast_to(digest, (number % 5 + 1, 32))
    return Embeddings({"embeddings": rows, "digest": digest}), digest.tobytes()


def ids(rank: int, ranks: int) -> Iterator[bytes]:
    """Requests whose only item belongs to this encoder rank, for ever."""
    number = 0
    while True:
        number += 1
        request = number.to_bytes(16, "big")
        if assign(request, [4], ranks) == [rank]:
            yield request


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.005)


async def results(futures: list[asyncio.Future[Outcome]]) -> list[wire.Result]:
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(*futures)
    assert not [outcome for outcome in outcomes if not isinstance(outcome, wire.Result)], outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, wire.Result)]


@pytest.mark.parametrize("transport", ["shm", "cpu"])
async def test_b44_what_a_dead_encoder_owed_is_encoded_by_the_others(run: Callable[..., Any], transport: str) -> None:
    async with run(encoders=3, transport=transport) as it:
        its = ids(1, 3)
        it.gate.touch()
        owed = [it.submit(next(its), ROWS_GATED)]
        await eventually(it.gate.with_suffix(".entered").exists)
        owed += [it.submit(next(its)) for _ in range(20)]
        ready, digest = embeddings(1)
        mixed = [it.client.submit_nowait([ready, *[image(4)] * 6], deadline_s=PATIENCE_S) for _ in range(5)]
        await it.stop("encoder", 1)
        it.gate.unlink()
        pid = it.kill("encoder", 1)
        done = await results(owed)
        assert {item.rank for result in done for item in result.items} == {0, 2}
        for result in await results(mixed):
            first, *others = result.items
            assert (first.rank, first.digest) == (-1, digest), "an encoder owes nothing of what came encoded"
            assert len(others) == 6
            assert {item.rank for item in others} <= {0, 2}

        await it.lives_again("encoder", 1, pid)
        [again] = await results([it.submit(next(its))])
        assert again.items[0].rank == 1, "it has its part of the work again"
        await it.gives_all_back()


async def test_b07_what_a_silent_encoder_owes_is_encoded_by_the_others(run: Callable[..., Any]) -> None:
    """It is not dead, and comes back; what it then makes of the same items is dropped."""
    async with run(encoders=2, quarantine_s=1.0) as it:
        its = ids(1, 2)
        await it.stop("encoder", 1)
        done = await results([it.submit(next(its)) for _ in range(10)])
        assert {item.rank for result in done for item in result.items} == {0}
        os.kill(it.supervisor.processes["encoder", 1], signal.SIGCONT)
        await it.gives_all_back()


@pytest.mark.parametrize("groups", [1, 2])
async def test_b21_a_dead_scheduler_gets_its_open_requests_again(run: Callable[..., Any], groups: int) -> None:
    """Some are in its engine, some wait for it, and of some the embeddings are not there yet."""
    async with run(encoders=2, groups=groups, service_ms=200, batch_tokens=60) as it:
        asked = [it.submit() for _ in range(20)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        pid = it.kill("scheduler", 0)
        assert all(result.items[0].digest for result in await results(asked))
        await it.lives_again("scheduler", 0, pid)
        await results([it.submit()])
        await it.gives_all_back()


@pytest.mark.parametrize(("groups", "tp_size"), [(1, 1), (2, 1), (1, 2)], ids=["alone", "another group", "two ranks"])
async def test_e3_b21_a_dead_scheduler_gets_the_embeddings_of_its_open_requests_again(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, groups: int, tp_size: int
) -> None:
    """Embeddings that came with a request: some it has read, and of others the lease dies with it."""
    answered: list[bytes] = []
    take = Client._take

    def counting(client: Client, door: Any, message: wire.Message) -> None:
        if isinstance(message, wire.Result | wire.Failed | wire.Busy):
            answered.append(message.request)
        take(client, door, message)

    monkeypatch.setattr(Client, "_take", counting)
    async with run(encoders=2, groups=groups, tp_size=tp_size, service_ms=200, batch_tokens=60) as it:
        [undisturbed] = await results([it.submit()])
        answered.clear()
        requests = [(2 * number).to_bytes(8, "big") * 2 for number in range(1, 21)]  # even ones go to the first group
        items = [embeddings(number) for number in range(len(requests))]

        def submit(number: int) -> Any:
            parts = [items[number][0], "and", *[image(4)] * (number % 2)]
            return it.client.submit_nowait(parts, request=requests[number], deadline_s=PATIENCE_S)

        asked = [submit(number) for number in range(15)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        await it.stop("scheduler", 0)
        asked += [submit(number) for number in range(15, 20)]
        await it.lends("tokenizer-0", 5)
        pid = it.kill("scheduler", 0)
        for number, result in enumerate(await results(asked)):
            encoded = [undisturbed.items[0].digest] * (number % 2)
            assert [item.digest for item in result.items] == [items[number][1], *encoded]
            assert result.items[0].rank == -1
        await it.lives_again("scheduler", 0, pid)
        await it.gives_all_back()
        assert sorted(answered) == sorted(requests), "each has one outcome"


@pytest.mark.parametrize("tokenizers", [1, 2])
async def test_b19_what_a_dead_tokenizer_owned_is_sent_again_by_the_client(
    run: Callable[..., Any], tokenizers: int
) -> None:
    async with run(tokenizers=tokenizers, encoders=2, service_ms=200, batch_tokens=60, quarantine_s=2.0) as it:
        asked = [it.submit() for _ in range(20)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        pid = it.kill("tokenizer", 0)
        assert all(result.items[0].digest for result in await results(asked))
        await it.lives_again("tokenizer", 0, pid)
        await results([it.submit() for _ in range(4)])
        await it.gives_all_back()


async def test_r10_what_a_tokenizer_owned_that_lost_its_gpu_is_sent_again(
    run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fake: the processor fails as torch does in a process that has no descriptors left."""
    once = tmp_path / "once"
    processor = f', processor: "odd_processor:LosesItsGpu", options: {{once: {once}}}'
    async with run(tokenizers=2, processor=processor) as it:
        once.touch()
        await results([it.submit() for _ in range(8)])
        assert not once.exists()
        await it.all_live()
    lines = [line for line in capfd.readouterr().err.splitlines() if "gpu_lost" in line]
    assert len(lines) == 1
    assert "OS call failed" in lines[0]


@pytest.mark.parametrize(
    ("stage", "sender"), [("encoder", "tokenizer"), ("scheduler", "encoder")], ids=["features", "embeddings"]
)
async def test_b19_what_is_on_its_way_in_a_connection_that_breaks_is_sent_again(
    run: Callable[..., Any], stage: str, sender: str
) -> None:
    """Both ends live. The messages lie in the kernel, since their receiver is stopped; and so do the proxies."""
    async with run() as it:
        await it.stop(stage, 0)
        asked = [it.submit() for _ in range(10)]
        await it.lends(f"{sender}-0", 10)
        pid, inbox = it.supervisor.processes[stage, 0], Runtime.of(it.deployment).inbox(stage, 0)
        assert sever(pid, inbox.removeprefix("ipc://"), it.supervisor.processes[sender, 0]) == 1
        os.kill(pid, signal.SIGCONT)
        done = await results(asked)
        assert all(result.items[0].digest for result in done)
        await it.gives_all_back()
        await it.all_live()


async def test_b44_a_burst_is_answered_to_the_last_whoever_asks_how_it_is_going(run: Callable[..., Any]) -> None:
    """200 requests at once for one encoder, while probes come and go, most of them before they have an answer."""
    async with run(encoders=1, service_ms=1) as it:
        asked = [it.submit() for _ in range(200)]
        for number in range(20):
            probe = asyncio.create_task(_probe(it.deployment))
            await asyncio.sleep(0.002 * number)
            probe.cancel()
            await asyncio.wait([probe])
        assert len(await results(asked)) == 200
        assert {member.state for member in await _probe(it.deployment)} == {"ready"}
        await results([it.submit() for _ in range(50)])
        await it.gives_all_back()


async def _probe(deployment: Deployment) -> list[wire.Member]:
    """What `tensorferry status` asks."""
    async with Client.connect(deployment, timeout_s=PATIENCE_S, wait=False) as client:
        return client.members()


async def test_b40_a_request_that_kills_whoever_encodes_it_is_not_passed_on_for_ever(run: Callable[..., Any]) -> None:
    async with run(encoders=2) as it:
        it.gate.touch()
        deadly = it.submit(rows=ROWS_LETHAL)
        async with asyncio.timeout(PATIENCE_S):
            outcome = await deadly
        assert isinstance(outcome, wire.Failed)
        assert (outcome.failure.kind, outcome.failure.retryable) == ("LethalRequest", False)
        await it.all_live()
        await results([it.submit() for _ in range(4)])


async def test_while_all_are_dead_nothing_is_lost(run: Callable[..., Any]) -> None:
    async with run(tokenizers=2, encoders=2, service_ms=200, batch_tokens=60, quarantine_s=2.0) as it:
        asked = [it.submit() for _ in range(20)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        for stage, rank in list(it.supervisor.processes):
            it.kill(stage, rank)
        await results(asked)


# --- who asks, and for how long


CLIENT = """
import asyncio, sys
from pathlib import Path
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
async def main():
    async with Client.connect(load(Path(sys.argv[1]))) as client:
        image = Path(sys.argv[2]).read_bytes()
        await asyncio.wait([client.submit_nowait([image]) for _ in range(30)])
asyncio.run(main())
"""


@contextmanager
def client_process(folder: Path, item: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """A client that asks for the same 30 times, of the deployment in this folder; it is killed with the block."""
    (folder / "image.png").write_bytes(item)
    arguments = [sys.executable, "-c", CLIENT, str(folder / "deployment.yaml"), str(folder / "image.png")]
    with subprocess.Popen(arguments) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
async def test_what_a_client_asked_for_that_was_killed_is_given_up(run: Callable[..., Any], tmp_path: Path) -> None:
    """Else everybody would wait for answers that nobody takes."""
    async with run() as it:
        it.gate.touch()
        with client_process(tmp_path, image(ROWS_GATED)) as asking:
            await it.owns(30)
            mine = it.submit()
            await it.owns(31)
            asking.kill()
            await it.owns(1)
        it.gate.unlink()
        await results([mine])
        await it.gives_all_back()


@pytest.mark.processes
async def test_a_client_that_is_stopped_is_not_taken_for_gone(run: Callable[..., Any], tmp_path: Path) -> None:
    async with run() as it:
        it.gate.touch()
        with client_process(tmp_path, image(ROWS_GATED)) as asking:
            await it.owns(30)
            asking.send_signal(signal.SIGSTOP)
            for _ in range(10):  # heartbeats of the tokenizer, which looks at every third whether it is there
                await asyncio.sleep(0.1)
                await it.owns(30)
            asking.send_signal(signal.SIGCONT)
            it.gate.unlink()
            assert await asyncio.to_thread(asking.wait, PATIENCE_S) == 0


async def test_a_tokenizer_that_drains_takes_nothing_new_and_finishes_what_it_has(run: Callable[..., Any]) -> None:
    async with run() as it:
        it.gate.touch()
        owned = it.submit(rows=ROWS_GATED)
        await it.owns(1)
        pid = it.supervisor.processes["tokenizer", 0]
        os.kill(pid, signal.SIGTERM)
        await it.until_members(lambda members: "leaving" in {member.state for member in members})
        refused = await it.submit()
        assert isinstance(refused, wire.Busy), refused
        assert refused.reason == "the deployment is draining"
        it.gate.unlink()
        await results([owned])
        await it.lives_again("tokenizer", 0, pid)  # else the next signal is its second, which cancels it


@asynccontextmanager
async def stranger(deployment: Deployment) -> AsyncIterator[Dealer]:
    """Another client, which keeps to nothing."""
    address = Runtime.of(deployment).front_door(0)
    with open_context() as context:
        with closing(Dealer(context, address, "tokenizer-0", Limits(), lambda problem: None)) as dealer:
            yield dealer


async def test_a_request_takes_no_longer_than_the_deployment_s_limit_whatever_its_clientuntil_members(
    run: Callable[..., Any],
) -> None:
    async with run(request_timeout_s=0.5) as it, stranger(it.deployment) as dealer:
        it.gate.touch()
        submit = wire.Submit(bytes(16), 0, (wire.ImagePart(0),), 1, 86_400_000)
        dealer.send_nowait(submit, [image(ROWS_GATED)])
        async with asyncio.timeout(PATIENCE_S):
            outcome: Any = None
            while outcome is None or isinstance(outcome, wire.Members):
                outcome = (await dealer.receive()).message
        it.gate.unlink()
        assert outcome.failure.kind == "DeadlineExceeded"
        assert outcome.failure.problem.startswith("not done within 0.5 s")


async def test_nobody_cancels_what_another_client_asked_for(run: Callable[..., Any]) -> None:
    async with run() as it, stranger(it.deployment) as dealer:
        it.gate.touch()
        owned = it.submit(bytes(16), ROWS_GATED)
        await it.owns(1)
        dealer.send_nowait(wire.Cancel(bytes(16), 0))
        dealer.send_nowait(wire.Hello(wire.PROTOCOL_VERSION, wire.Origin("client", 0, 7), "client"))
        async with asyncio.timeout(PATIENCE_S):
            await dealer.receive()  # so the other has been taken too
        it.gate.unlink()
        await results([owned])
