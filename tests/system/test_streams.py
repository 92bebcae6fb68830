"""Streamed answers of a whole deployment: each token once, in order, at its time, whatever becomes of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.faults import sever

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import AnswerFailed
from tensorferry.pipeline.client.answer_stream import AnswerStream
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.growing_answer import is_repeatable
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.engines.base import EngineRequest
from tensorferry.stages.engines.paced import made_up

START_S = 60.0
DEADLINE_S = 40.0
SAMPLED = wire.Sampling(temperature=1.0)

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

DEPLOYMENT = """
name: streams-test
transport: shm
runtime_dir: {runtime_dir}
model: {{adapter: fingerprint}}
tokenizer: {{workers: {tokenizers}, threads: 1}}
encoder: {{ranks: {encoders}}}
scheduler: {{groups: {groups}, tp_size: {tp_size}, attention_tp_size: {tp_size}, engine: paced, options: {options}}}
pool: {{budget_mb: 64, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
restarts: {{most: 100}}
limits: {{request_timeout_s: 40}}
telemetry: {{log_level: warning, log_format: json}}
"""

Running = Callable[..., "asyncio._AsyncGeneratorContextManager"]  # type: ignore[name-defined]


class Deployed:
    """A deployment that runs, and a client of it."""

    def __init__(self, deployment: Deployment, supervisor: Supervisor, client: Client) -> None:
        self.deployment, self.supervisor, self.client = deployment, supervisor, client

    def kill(self, stage: str, rank: int = 0) -> None:
        os.kill(self.supervisor.processes[stage, rank], signal.SIGKILL)

    async def gauge(self, name: str, stage: str) -> float:
        members = await self.client.refresh()
        return sum(
            gauge.value for member in members for gauge in member.gauges if (member.stage, gauge.name) == (stage, name)
        )

    async def until_gauge(self, name: str, stage: str, value: float) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (found := await self.gauge(name, stage)) != value:
                await asyncio.sleep(0.05)
                assert found >= 0


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


@pytest.fixture
def deployed(tmp_path: Path, short_path: Path) -> Callable[..., object]:
    """`async with deployed(token_ms=5) as run`: options of the engine `paced`, and numbers of processes."""

    @asynccontextmanager
    async def start(
        *, tokenizers: int = 1, encoders: int = 1, groups: int = 1, tp_size: int = 1, **options: float
    ) -> AsyncIterator[Deployed]:
        file = tmp_path / "deployment.yaml"
        said = "{" + ", ".join(f"{name}: {value}" for name, value in options.items()) + "}"
        file.write_text(
            DEPLOYMENT.format(
                runtime_dir=short_path / "run",
                tokenizers=tokenizers,
                encoders=encoders,
                groups=groups,
                tp_size=tp_size,
                options=said,
            )
        )
        deployment = load(file)
        async with (
            Supervisor.running(deployment, file) as supervisor,
            Client.connect(deployment, timeout_s=START_S) as client,
        ):
            yield Deployed(deployment, supervisor, client)

    return start


def answer_to(prompt: str, tokens: int, sampling: wire.Sampling = wire.Sampling()) -> bytes:  # noqa: B008
    """What `paced` answers to a text, in letters: its token ids are their bytes."""
    ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    return made_up(EngineRequest(bytes(16), ids, [], [], tokens, sampling=sampling))


def ids_of(letters: bytes) -> bytes:
    return np.frombuffer(letters, np.uint8).astype("<i4").tobytes()


def letters_of(ids: bytes) -> bytes:
    return np.frombuffer(ids, "<i4").astype(np.uint8).tobytes()


async def read(stream: AnswerStream) -> list[wire.Delta]:
    """Until its end. Each token comes once, in order."""
    deltas = []
    async for delta in stream:
        assert delta.first == sum(len(each.token_ids) for each in deltas) // 4
        deltas.append(delta)
    return deltas


def check(deltas: list[wire.Delta], stream: AnswerStream, letters: bytes) -> None:
    """It is this answer, told as it came, and the same again in the result."""
    assert b"".join(delta.token_ids for delta in deltas) == ids_of(letters)
    assert "".join(delta.text for delta in deltas) == letters.decode()
    times = [at_ns for delta in deltas for at_ns in delta.at_ns]
    assert len(times) == len(letters)
    result = stream.outcome
    assert isinstance(result, wire.Result)
    assert (result.token_ids, result.text, result.finish) == (ids_of(letters), letters.decode(), "length")
    assert result.output_tokens == len(letters)


async def test_a_stream_gives_every_token_once_in_order_at_its_time(deployed: Callable[..., Running]) -> None:
    async with deployed(first_ms=50, token_ms=10) as run, asyncio.timeout(DEADLINE_S):
        stream = run.client.stream(["Tell me. "], output_tokens=60)
        deltas = await read(stream)
        check(deltas, stream, answer_to("Tell me. ", 60))
        assert len(deltas) > 10, "the answer did not come as it was made"
        times = [at_ns for delta in deltas for at_ns in delta.at_ns]
        assert times == sorted(times)
        assert times[-1] - times[0] >= 59 * 10_000_000 * 0.9
        assert isinstance(stream.outcome, wire.Result)
        assert stream.outcome.prompt_tokens == len("Tell me. ")
        marks = {mark.step: mark.at_ns for mark in stream.outcome.marks}
        assert (marks["first_token"], marks["last_token"]) == (times[0], times[-1])


async def test_who_does_not_ask_for_a_stream_gets_one_result(deployed: Callable[..., Running]) -> None:
    async with deployed(token_ms=1) as run, asyncio.timeout(DEADLINE_S):
        result = await run.client.submit(["Tell me. "], output_tokens=30)
        assert isinstance(result, wire.Result)
        letters = answer_to("Tell me. ", 30)
        assert (result.token_ids, result.text, result.finish) == (ids_of(letters), letters.decode(), "length")


async def test_the_first_rank_of_an_attention_group_tells_the_answer(deployed: Callable[..., Running]) -> None:
    async with deployed(tp_size=2, token_ms=2) as run, asyncio.timeout(DEADLINE_S):
        stream = run.client.stream(["of two"], output_tokens=50)
        check(await read(stream), stream, answer_to("of two", 50))


async def test_leaving_the_loop_cancels_the_answer(deployed: Callable[..., Running]) -> None:
    async with deployed(token_ms=20) as run, asyncio.timeout(DEADLINE_S):
        stream = run.client.stream(["a long one"], output_tokens=100_000)
        async for delta in stream:
            assert delta.token_ids
            break
        await run.until_gauge("running", "scheduler", 0.0)
        assert await run.gauge("in_flight", "tokenizer") == 0
        with pytest.raises(AnswerFailed, match="Cancelled"):
            await read(stream)


async def test_a_stream_ends_at_its_deadline_by_name(deployed: Callable[..., Running]) -> None:
    async with deployed(token_ms=20) as run, asyncio.timeout(DEADLINE_S):
        stream = run.client.stream(["a long one"], output_tokens=100_000, deadline_s=1.0)
        with pytest.raises(AnswerFailed, match="DeadlineExceeded"):
            await read(stream)
        assert stream.tokens > 5
        await run.until_gauge("running", "scheduler", 0.0)


async def test_a_choice_that_the_engine_does_not_have_is_refused_by_name(deployed: Callable[..., Running]) -> None:
    async with deployed() as run, asyncio.timeout(DEADLINE_S):
        stream = run.client.stream(["x"], output_tokens=4, sampling=wire.Sampling(top_k=5))
        with pytest.raises(AnswerFailed, match=r"BadRequest: .*sampling\.top_k is 5; the engine `paced`"):
            await read(stream)
        beside = run.client.stream(["x"], output_tokens=4)
        check(await read(beside), beside, answer_to("x", 4))


async def ask_one(run: Deployed, ended: list[str], name: str, tokens: int, **options: Any) -> None:
    """Read an answer to its end, and append its name then."""
    await read(run.client.stream([name], output_tokens=tokens, **options))
    ended.append(name)


async def test_a_tenant_with_much_work_does_not_hold_up_another_one(deployed: Callable[..., Running]) -> None:
    """One answer at a time: of 12 long requests of one tenant that wait, one more is served before the short one."""
    async with deployed(requests=1, token_ms=1) as run, asyncio.timeout(DEADLINE_S):
        ended: list[str] = []
        ask = partial(ask_one, run, ended)
        async with asyncio.TaskGroup() as asked:
            for number in range(12):
                asked.create_task(ask(f"batch {number}", 300, tenant="batch"))
            await run.until_gauge("queued", "scheduler", 11.0)
            assert await run.gauge("running", "scheduler") == 1.0
            asked.create_task(ask("interactive", 5, tenant="interactive"))
        assert ended.index("interactive") <= 2, ended


async def test_an_urgent_request_is_served_next(deployed: Callable[..., Running]) -> None:
    async with deployed(requests=1, token_ms=1) as run, asyncio.timeout(DEADLINE_S):
        ended: list[str] = []
        ask = partial(ask_one, run, ended)
        async with asyncio.TaskGroup() as asked:
            for number in range(6):
                asked.create_task(ask(f"usual {number}", 300))
            await run.until_gauge("queued", "scheduler", 5.0)
            asked.create_task(ask("urgent", 300, priority=-1))
        assert ended.index("urgent") <= 2, ended


# --- over any death


async def streams_over(run: Deployed, hurt: Callable[[], None], sampling: wire.Sampling, count: int = 6) -> list[str]:
    """Many answers at once, about an image each, and what is done when all of them have begun. Returns why those failed
    that did; the others are whole."""
    image = (Path(__file__).parents[2] / "examples/images/rocket.jpg").read_bytes()
    begun = [asyncio.Event() for _ in range(count)]
    failed: list[str] = []

    async def one(number: int) -> None:
        stream = run.client.stream([f"answer {number}", image], output_tokens=150, sampling=sampling)
        deltas: list[wire.Delta] = []
        try:
            async for delta in stream:
                assert delta.first == sum(len(each.token_ids) for each in deltas) // 4
                deltas.append(delta)
                if delta.first > 10:
                    begun[number].set()
        except AnswerFailed as problem:
            failed.append(str(problem))
        else:
            assert isinstance(stream.outcome, wire.Result)
            check(deltas, stream, letters_of(stream.outcome.token_ids))
            if is_repeatable(sampling):
                again = await run.client.submit([f"answer {number}", image], output_tokens=150, sampling=sampling)
                assert isinstance(again, wire.Result)
                assert again.token_ids == stream.outcome.token_ids

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as asked:
        for number in range(count):
            asked.create_task(one(number))
        await asyncio.gather(*(each.wait() for each in begun))
        hurt()
    return failed


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
@pytest.mark.parametrize("stage", ["scheduler", "encoder", "tokenizer"])
@pytest.mark.parametrize("sampling", [wire.Sampling(), wire.Sampling(seed=7)], ids=["greedy", "seeded"])
async def test_a_stream_goes_on_over_a_death_without_a_gap_or_a_repetition(
    deployed: Callable[..., Running], stage: str, sampling: wire.Sampling
) -> None:
    async with deployed(token_ms=10, tokenizers=2, encoders=2, groups=2) as run:
        assert await streams_over(run, lambda: run.kill(stage), sampling) == []


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
@pytest.mark.parametrize("stage", ["scheduler", "tokenizer"])
async def test_a_sampled_stream_without_a_seed_fails_by_name_over_a_death(
    deployed: Callable[..., Running], stage: str
) -> None:
    async with deployed(token_ms=10, tokenizers=2, groups=2) as run:
        failed = await streams_over(run, lambda: run.kill(stage), SAMPLED)
        assert failed
        assert all(reason.startswith("StreamDiverged: the answer cannot go on at token ") for reason in failed), failed


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
@pytest.mark.parametrize("stage", ["scheduler", "tokenizer"])
async def test_a_stream_goes_on_over_broken_connections(deployed: Callable[..., Running], stage: str) -> None:
    async with deployed(token_ms=10, tokenizers=2, groups=2) as run:
        directory = str(Runtime.of(run.deployment).directory)

        def cut() -> None:
            assert sever(run.supervisor.processes[stage, 0], directory)

        assert await streams_over(run, cut, wire.Sampling()) == []


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_an_answer_is_told_again_where_the_way_to_its_owner_alone_broke(deployed: Callable[..., Running]) -> None:
    """The owner does not see that: it sends nothing again, and also an answer by chance goes on."""
    async with deployed(token_ms=10) as run:
        inbox = str(Runtime.of(run.deployment).directory / "tokenizer-0")
        scheduler = run.supervisor.processes["scheduler", 0]

        def cut() -> None:
            assert sever(run.supervisor.processes["tokenizer", 0], inbox, made_by=scheduler)

        assert await streams_over(run, cut, SAMPLED) == []
