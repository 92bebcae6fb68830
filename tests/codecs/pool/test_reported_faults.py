"""The faults that users of such services report of pools, leases and acknowledgements, each as a whole kind.

| row | the kind | shown by |
|---|---|---|
| B01 | memory grows under consumers of different speeds, or comes back only with new traffic | `test_b01_...` here, and in `test_publisher.py`; `test_recycler.py` |
| B02 | bytes are shown before they are written, or lent again before they are read | `test_process_death.py` and its planted faults; `protocol/`: the two historical faults among its attacks; `test_pool.py`: `bytes_are_not_shown_before_they_are_written` |
| B03 | the fallback of a full or fragmented pool loses or breaks something | `test_b03_...` here (seven images, one warning), and in `test_publisher.py` (too large, fragmented) |
| B04 | some items inline, some not, and a rank without any | `test_b04_...` here |
| B05 | all pools together take more than the budget | `test_b04_b05_...` here; `test_load.py`: `test_p5_...` |
| B06 | a request that fails late keeps what it had taken | `test_b06_...` here; `test_pool.py`: `acknowledged_unread`, `abandoned_before_it_was_ready`; `test_pipeline.py`: cancelled and overdue requests |
| B07 | a dead, stopped or failing consumer stops everybody, or its bytes are lent again too soon | `test_quarantine.py`; `test_process_death.py`; `test_pool.py` and `test_reader.py`: `test_b07_...` |
| B08 | the wrong number of readers is counted | `test_b08_...` here; `test_declared.py`; `test_pipeline.py`: `test_e6_...` |
| B09 | one lease, opened or sent several times | `test_consumer.py`; `test_b09_...` here; `test_reader.py` and `test_pool.py`: `test_b09_...` |
| B10 | what a crash leaves fills shared memory | `test_b10_...` here; `test_process_death.py` |
| B11 | memory goes with whoever leaves first | `test_b11_...` here |
| B12 | memory that is not there when it is touched | `test_host.py`: `test_b12_...`, `every_page_is_there_before_it_is_used`, `a_hollow_segment_costs_its_reader_nothing` |
| B13 | a view travels with all that it is a view of | `test_b13_...` here, and in `test_tensors.py` |
| B26 | a late answer reaches the next request | `test_b26_...` here; `test_reader.py`: `a_proxy_of_a_lease_that_is_over_is_refused` |
| B30 | what was sent, or received, changes afterwards or keeps other memory | `test_b30_...` here, and in `test_publisher.py`; `test_frames.py`: alignment; `test_channels.py`: 50 MB |
"""  # noqa: E501 - a table

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import os
import re
import sys
import tempfile
import time
import tomllib
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from PIL import Image
from structlog.testing import capture_logs

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.codecs.messages import Inline, Payload
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES, View
from tensorferry.pipeline.channels.channels import Inbox, Outbox, open_context
from tensorferry.pipeline.client.client import Client, Outcome
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec
from tensorferry.pipeline.pools.broker import Broker, recycle
from tensorferry.pipeline.pools.own_pool import FallbackWarning
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.assignment import assign
from tensorferry.stages.processors.registry import make_processor

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parents[2] / "programs"
DEADLINE_S = 20.0
START_S = 60.0
KIB, MIB = 1 << 10, 1 << 20
Peer = Any  #: conftest.Peer
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def some(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(data: Any) -> str:
    return hashlib.blake2b(bytes(data), digest_size=16).hexdigest()


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module", autouse=True)
def what_libraries_keep() -> None:
    """Before anything is counted: pyzmq keeps a thread for uncopied frames, with its sockets."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://one")
        other.connect("inproc://one")
        one.send(bytes(1 << 20), copy=False)
        other.recv()


def test_the_table_names_tests_that_there_are() -> None:
    rows = [line.split("|") for line in str(__doc__).splitlines() if line.startswith("| B")]
    assert [row[1].strip() for row in rows] == [*(f"B{number:02}" for number in range(1, 14)), "B26", "B30"]
    tests = {path.name: path.read_text(encoding="utf-8") for path in Path(__file__).parents[2].rglob("test_*.py")}
    for _, row, _, shown_by, _ in rows:
        own = Path(__file__).name if " here" in shown_by else ""
        files = [*re.findall(r"test_\w+\.py", shown_by), *filter(None, [own])]
        assert files, row
        for name in re.findall(r"`([a-z]\w+)(?:\.\.\.)?`", shown_by):
            assert any(re.search(rf"def \w*{name}", tests[file]) for file in files), f"{row}: {name} in none of {files}"


# --- pools ------------------------------------------------------------------------------------------------------


async def test_b01_a_slow_consumer_costs_no_memory_and_reclaim_needs_no_traffic(
    start_peer: Callable[[], Peer],
) -> None:
    """200 tensors for two processes, of which one reads each three tensors late."""
    quick, slow = start_peer(), start_peer()
    with Pool.create(256 * KIB, 64) as pool:
        columns = [quick.join(pool), slow.join(pool)]
        publisher = Publisher(pool, inline_below_nbytes=0)
        recycling = asyncio.create_task(recycle(pool, 0.001))
        late: list[tuple[int, bytes, list[bytes]]] = []

        def read(peer: Peer, seed: int, payload: bytes, frames: list[bytes]) -> None:
            assert peer.ask("read", payload, frames)[2] == digest(some(64 * KIB, seed))

        for seed in range(200):
            frames: list[Buffer] = []
            with publisher.publish(some(64 * KIB, seed)) as draft:
                payloads = [draft.dispatch(column, frames, consumers=2)[0] for column in columns]
            inline = [bytes(frame) for frame in frames]
            read(quick, seed, encode(payloads[0]), inline)
            late.append((seed, encode(payloads[1]), inline))
            if len(late) > 3:
                read(slow, *late.pop(0))
            await asyncio.sleep(0)
        for owed in late:
            read(slow, *owed)
        await eventually(lambda: pool.statistics().lent_nbytes == 0)
        recycling.cancel()
        await asyncio.wait([recycling])
        statistics = pool.statistics()
        assert statistics.peak_lent_nbytes <= statistics.capacity_nbytes == 256 * KIB
        assert statistics.longest_free_nbytes == 256 * KIB
        assert publisher.drafts.total() == 200
        assert publisher.drafts["pool"] > 50
        assert publisher.drafts["pool"] + publisher.drafts["pool_full"] == 200


@pytest.mark.slow
def test_b03_seven_images_that_do_not_fit_go_inline_with_one_warning() -> None:
    processor = make_processor("qwen2-vl", {}, LimitsSpec())
    counters = Counters()
    with Pool.create(MIB, 8) as pool, capture_logs() as logs:
        publisher = Publisher(pool, inline_below_nbytes=0, on_fallback=FallbackWarning(counters, "pool.budget_mb"))
        plan = processor.plan(photo(1120, 700, 0))
        wanted = View.empty(plan.dtype, plan.shape)
        for seed in range(7):
            picture = photo(1120, 700, seed)
            processor.write(picture, plan, wanted)
            frames: list[Buffer] = []
            with publisher.draft([(plan.dtype, plan.shape)]) as draft:
                processor.write(picture, plan, draft.views[0])
                [payload] = draft.dispatch(None, frames)
            assert isinstance(payload, Inline)
            assert np.array_equal(frames[payload.frame], wanted.data)
        assert pool.statistics().leases == 0
    assert publisher.drafts == {"pool_full": 7}
    assert counters.value("pool_full_fallbacks") == 7
    [warning] = [log for log in logs if log["event"] == "pool_full"]
    assert warning["tensor_nbytes"] == wanted.nbytes > MIB
    assert (warning["longest_free_nbytes"], warning["pool_nbytes"]) == (MIB, MIB)
    assert "pool.budget_mb" in warning["remedy"]


@pytest.mark.parametrize("readers", [[0], [1], [2, 3], [0, 1, 2, 3]], ids=str)
def test_b08_a_lease_waits_for_those_who_read_and_for_nobody_else(readers: list[int]) -> None:
    """Of four ranks one, an attention group, or all."""
    with Pool.create(MIB, 8) as pool, ExitStack() as ranks:
        consumers = [ranks.enter_context(Reader()) for _ in range(4)]
        columns = [pool.admit(*consumer.attach(*pool.export())) for consumer in consumers]
        with Publisher(pool, inline_below_nbytes=0).publish(some(1000)) as draft:
            proxies = {rank: draft.dispatch(columns[rank], [], consumers=len(readers))[0] for rank in readers}
        for rank, proxy in proxies.items():
            pool.reclaim()
            assert pool.statistics().lent_slots == 1
            with consumers[rank].open(proxy) as view:
                assert (view.data == some(1000)).all()
                del view
        pool.reclaim()
        assert pool.statistics().lent_slots == 0


def test_b09_one_item_for_three_samples_of_two_ranks(start_peer: Callable[[], Peer]) -> None:
    with Pool.create(MIB, 8) as pool:
        ranks = [start_peer(), start_peer()]
        columns = [rank.join(pool) for rank in ranks]
        with Publisher(pool, inline_below_nbytes=0).publish(some(1000)) as draft:
            proxies = [encode(draft.dispatch(column, [], consumers=2, uses=3)[0]) for column in columns]
        for _ in range(3):
            for rank, proxy in zip(ranks, proxies, strict=True):
                pool.reclaim()
                assert pool.statistics().lent_slots == 1
                assert rank.ask("read", proxy)[2] == digest(some(1000))
        pool.reclaim()
        assert pool.statistics().lent_slots == 0


def holders() -> dict[int, set[str]]:
    """The inodes of our memfds, and the processes that have each mapped or open; as far as we may look."""
    found: dict[int, set[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            for line in (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
                if "/memfd:tensorferry" in line:
                    found.setdefault(int(line.split()[4]), set()).add(process.name)
            for fd in (process / "fd").iterdir():
                if "/memfd:tensorferry" in os.readlink(fd):
                    found.setdefault(os.stat(fd).st_ino, set()).add(process.name)
    return found


def test_b10_crash_after_crash_leaves_no_memory(start_peer: Callable[[], Peer], until: Callable[..., None]) -> None:
    """Producer and consumer are killed, the memory lent, read and waiting; then all of it is gone."""
    shared_memory = set(os.listdir("/dev/shm"))
    for _ in range(3):
        producer, consumer = start_peer(), start_peer()
        producer.ask("create", 8 * MIB, 8)
        export = producer.ask("export")
        inodes = {os.fstat(fd).st_ino for fd in producer.fds[:2]}
        attachment = consumer.ask("attach", export, fds=producer.fds)
        inodes.add(os.fstat(consumer.fds[0]).st_ino)
        for fd in producer.fds:
            os.close(fd)
        column = producer.ask("admit", attachment, fds=consumer.fds)
        for fd in consumer.fds:
            os.close(fd)
        payloads = [producer.ask("publish", column, bytes(1000)) for _ in range(3)]
        consumer.ask("borrow", payloads[0])
        held = holders()
        assert all(held[inode] == {str(producer.pid), str(consumer.pid)} for inode in inodes), "the check sees them"
        producer.kill()
        consumer.kill()
        until(lambda inodes=inodes: not holders().keys() & inodes)
    assert set(os.listdir("/dev/shm")) == shared_memory


@pytest.mark.processes
@pytest.mark.parametrize("leaves", ["by itself", "killed"])
async def test_b11_memory_stays_when_a_reader_leaves(leaves: str) -> None:
    """The reader is an unrelated process, and says nothing on its way out."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder, Pool.create(MIB, 8) as pool:
        path = f"{folder}/pool.sock"
        columns: list[int] = []
        async with Broker(path, pool, lambda origin, column: columns.append(column)), asyncio.timeout(DEADLINE_S):
            for turn in range(2):  # the second comes when the first has left
                command = ["-W", "error", str(PROGRAMS / "consumer.py"), path, str(pool.description.pool)]
                pipe = asyncio.subprocess.PIPE
                reader = await asyncio.create_subprocess_exec(
                    sys.executable, *command, stdin=pipe, stdout=pipe, stderr=pipe
                )
                assert reader.stdin is not None
                assert reader.stdout is not None
                assert int(await reader.stdout.readline()) == columns[-1] == turn
                with Publisher(pool, inline_below_nbytes=0).publish(some(1000, turn)) as draft:
                    [proxy] = draft.dispatch(columns[-1], [])
                reader.stdin.write(encode(proxy).hex().encode() + b"\n")
                assert bytes.fromhex((await reader.stdout.readline()).decode()) == some(1000, turn).tobytes()
                if leaves == "killed":
                    reader.kill()
                _, said = await reader.communicate(b"")
                assert said == b""
            await eventually(lambda: pool.reclaim() or not pool.statistics().lent_slots)
    assert not [name for name in os.listdir("/dev/shm") if "tensorferry" in name]


def test_b13_sixty_four_views_of_one_tensor_cost_what_they_show() -> None:
    """In the pool, and on the wire; packed or each by itself, contiguous or not."""
    whole = some(64 * 100 * 1000).reshape(64, 100, 1000)
    parts = [whole[place, :, : 10 + place] for place in range(64)]  # strided
    shown = sum(part.nbytes for part in parts)
    with Pool.create(MIB, 128) as pool, Reader() as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        publisher = Publisher(pool, inline_below_nbytes=0)
        payloads: list[Payload] = []
        frames: list[Buffer] = []
        for part in parts:
            with publisher.publish(part) as draft:
                payloads += draft.dispatch(column, frames)
        assert shown <= pool.statistics().lent_nbytes < shown + 64 * 256
        assert len(encode(payloads)) < 64 * 60
        for part, payload in zip(parts, payloads, strict=True):
            with reader.open(payload) as view:
                assert (view.numpy() == part).all()
        with Publisher(None).publish(*parts) as draft:
            draft.dispatch(None, frames)
        assert sum(len(frame) for frame in frames) == shown


# --- B30: what was sent and received ----------------------------------------------------------------------------


@pytest.mark.slow
async def test_b30_fifty_megabytes_sent_inline_may_be_overwritten_at_once() -> None:
    """The receiver is slow: when it begins to read, most of the bytes have not left the sender's memory yet."""
    messages, nbytes = 3, 50 << 20
    origin = wire.Origin("encoder", 0, 1)
    source = np.empty(nbytes, np.uint8)
    with tempfile.TemporaryDirectory(prefix="tf-") as folder, open_context() as context:
        address = f"ipc://{folder}/inbox"
        publisher = Publisher(None)
        with closing(Outbox(context, address, "slow")) as outbox:
            for number in range(messages):
                source[:] = number + 1
                frames: list[Buffer] = []
                with publisher.publish(source) as draft:
                    [payload] = draft.dispatch(None, frames)
                source[:] = 99
                output = wire.Tensor("features", payload)
                embedding = wire.Embedding(0, 1, (output,))
                message = wire.Embeddings(bytes(16), number, 1, origin, (embedding,), ())
                outbox.send_nowait(message, frames)
                del frames, draft
            with closing(Inbox(context, address, Limits(), lambda problem: pytest.fail(str(problem)))) as inbox:
                for number in range(messages):
                    async with asyncio.timeout(DEADLINE_S):
                        received = await inbox.receive()
                    assert isinstance(received.message, wire.Embeddings)
                    payload = received.message.items[0].outputs[0].payload
                    with Reader() as reader, reader.open(payload, received.frames) as view:
                        assert received.message.attempt == number
                        assert (view.data == number + 1).all()
                        own = view.copy()
                    assert own.data.flags.writeable
                    assert own.data.flags.aligned
                    assert not np.shares_memory(own.data, np.frombuffer(received.frames[0], np.uint8))
                    del received, view


def test_b30_a_small_tensor_keeps_no_large_one_alive() -> None:
    """Every inline payload has a frame of its own, so what is kept of a message is what is looked at."""
    large, small = np.zeros(8 << 20, np.uint8), np.arange(10, dtype=np.uint8)
    frames: list[Buffer] = [large.copy(), small.copy()]
    seen = weakref.ref(frames[0])
    with Reader() as reader, ExitStack() as block:
        view = block.enter_context(reader.open(Inline(1, CODES["uint8"], (10,)), frames))
        frames.clear()
        gc.collect()
        assert seen() is None
        assert view.data.tolist() == list(range(10))


def test_b30_a_header_with_an_extension_type_is_no_message() -> None:
    """Old msgspec let an extension's view reach past its end; there is none in the protocol, and the floor is kept."""
    from tensorferry.codecs.errors import BadMessage
    from tensorferry.codecs.frames import decode as decode_frames

    good = encode(wire.Drain(wire.Origin("encoder", 0, 1)))
    assert decode_frames([good], Limits())[0] == wire.Drain(wire.Origin("encoder", 0, 1))
    for header in (encode(msgspec.msgpack.Ext(5, b"abc")), good[:-1] + encode(msgspec.msgpack.Ext(5, b"abc"))):
        with pytest.raises(BadMessage):
            decode_frames([header], Limits())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "msgspec>=0.23" in project["project"]["dependencies"]


# --- whole deployments --------------------------------------------------------------------------------------------

DEPLOYMENT = """
name: field-reports
transport: shm
runtime_dir: {folder}/run
model: {{adapter: "odd_adapter:Odd", options: {{gate: {folder}/gate}}}}
tokenizer: {{workers: {tokenizers}, threads: 1}}
encoder: {{ranks: {encoders}}}
scheduler: {{tp_size: {tp_size}, attention_tp_size: 1, engine: "odd_engine:Odd", options: {{digests: true}}}}
pool: {{budget_mb: {budget_mb}, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 4, inline_below_kb: 0}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 30.0}}
telemetry: {{log_level: error, log_format: json}}
"""
GATED_ROWS, FAILING_TOKENS = 11, 666  #: where the odd adapter waits, and the odd engine fails


@pytest.fixture
def run(may_start_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A running deployment: (its description, a client, the gate of the odd adapter)."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=os.pathsep)

    @asynccontextmanager
    async def running(
        tokenizers: int = 1, encoders: int = 1, tp_size: int = 1, budget_mb: int = 16
    ) -> AsyncIterator[tuple[Deployment, Client, Path]]:
        file = tmp_path / "deployment.yaml"
        settings = {"tokenizers": tokenizers, "encoders": encoders, "tp_size": tp_size, "budget_mb": budget_mb}
        file.write_text(DEPLOYMENT.format(folder=folder, **settings))
        deployment = load(file)
        async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=START_S) as client:
            yield deployment, client, Path(folder) / "gate"

    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield running


def photo(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).resize((width, height)).save(file, "PNG")
        return file.getvalue()


def digests_of(deployment: Deployment, *pictures: bytes) -> list[bytes]:
    """What the adapter must have made of them, computed here."""
    processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
    found = []
    for picture in pictures:
        plan = processor.plan(picture)
        out = View.empty(plan.dtype, plan.shape)
        processor.write(picture, plan, out)
        found.append(fingerprint_of(out.data.data, plan.dtype, plan.shape))
    return found


async def lends(client: Client, wanted: dict[str, float]) -> None:
    """Until so many leases are out, by process."""
    end = time.monotonic() + DEADLINE_S
    while True:
        lent = {
            f"{member.stage}-{member.rank}": gauge.value
            for member in await client.refresh()
            for gauge in member.gauges
            if gauge.name == "pool_lent_slots" and gauge.value
        }
        if lent == wanted:
            return
        assert time.monotonic() < end, f"{lent} are out, not {wanted}"
        await asyncio.sleep(0.02)


async def answers(*futures: asyncio.Future[Outcome]) -> list[Outcome]:
    async with asyncio.timeout(DEADLINE_S):
        return list(await asyncio.gather(*futures))


async def test_b04_b05_some_inline_some_not_and_ranks_without_an_item(run: Callable[..., Any]) -> None:
    """Requests of eight items, of which three fit, and of one, which leaves three of four ranks without any."""
    async with run(tokenizers=2, encoders=4, budget_mb=2) as (deployment, client, _):
        pictures = [photo(140, 98, seed) for seed in range(8)]  # 70 patches, 329,280 bytes
        wanted = digests_of(deployment, *pictures)
        requests = [(number.to_bytes(16, "big"), range(8)) for number in range(6)]
        requests += [(number.to_bytes(16, "big"), range(number % 8, number % 8 + 1)) for number in range(6, 18)]
        travelled: Counter[str] = Counter()
        for request, items in requests:
            [outcome] = await answers(client.submit_nowait([pictures[item] for item in items], request=request))
            assert isinstance(outcome, wire.Result), outcome
            assert [item.digest for item in outcome.items] == [wanted[item] for item in items]
            assert [item.rank for item in outcome.items] == assign(request, [70] * len(items), 4)
            travelled.update(item.transport for item in outcome.items)
        assert min(travelled["shm"], travelled["inline"]) > 10, travelled
        await lends(client, {})
        capacities = [
            gauge.value
            for member in await client.refresh()
            if member.stage == "tokenizer"
            for gauge in member.gauges
            if gauge.name == "pool_capacity_nbytes"
        ]
        assert len(capacities) == 2
        assert sum(capacities) <= 2 * MIB


async def test_b06_b08_whatever_becomes_of_a_request_its_slices_come_back(run: Callable[..., Any]) -> None:
    """Of two scheduler ranks one attends to each request. The encoder is held up, so that what is over waits there."""
    async with run(tp_size=2) as (deployment, client, gate):
        good = photo(140, 98, 1)
        [wanted] = digests_of(deployment, good)
        gate.touch()
        first = client.submit_nowait([photo(28 * GATED_ROWS, 28, 0)])
        await eventually(lambda: gate.with_suffix(".entered").exists() or first.done())
        bad = [client.submit_nowait([good, good, good[:100]]) for _ in range(5)]  # the last image of them
        refused = [client.submit_nowait([good, good], output_tokens=FAILING_TOKENS) for _ in range(5)]  # by the engine
        overdue = [client.submit_nowait([good] * 2, deadline_s=4.0) for _ in range(5)]
        ids = [bytes([number + 1]) * 16 for number in range(5)]
        cancelled = [client.submit_nowait([good] * 2, request=request) for request in ids]
        fine = [client.submit_nowait([good, good]) for _ in range(5)]
        await lends(client, {"tokenizer-0": 41, "encoder-0": 2})  # all that are not bad wait behind the first
        for request in ids:
            client.cancel(request)
        for futures, kind in ((bad, "BadItem"), (cancelled, "Cancelled"), (overdue, "DeadlineExceeded")):
            outcomes = await answers(*futures)
            assert [each.failure.kind for each in outcomes if isinstance(each, wire.Failed)] == [kind] * 5
        gate.unlink()
        outcomes = await answers(*refused)
        assert [each.failure.kind for each in outcomes if isinstance(each, wire.Failed)] == ["EngineError"] * 5
        for outcome in await answers(first, *fine):
            assert isinstance(outcome, wire.Result), outcome
        assert [item.digest for item in outcome.items] == [wanted, wanted]
        await lends(client, {})
        outcomes = await answers(*(client.submit_nowait([good]) for _ in range(20)))
        transports = [item.transport for each in outcomes if isinstance(each, wire.Result) for item in each.items]
        assert transports == ["shm"] * 20, "nothing is on the slow path afterwards"


async def test_b26_a_late_answer_reaches_nobody_else(run: Callable[..., Any]) -> None:
    """One is given up while it is encoded; the others behind it use its slots, and its answer comes late."""
    async with run() as (deployment, client, gate):
        gate.touch()
        given_up = b"a" * 16
        held = client.submit_nowait([photo(28 * GATED_ROWS, 28, 0)], request=given_up)
        await eventually(gate.with_suffix(".entered").exists)
        client.cancel(given_up)
        [lost] = await answers(held)
        assert isinstance(lost, wire.Failed)
        assert lost.failure.kind == "Cancelled"
        pictures = [photo(28 * GATED_ROWS, 28, seed) for seed in range(1, 11)]
        futures = [client.submit_nowait([picture]) for picture in pictures]
        gate.unlink()
        for picture, outcome in zip(pictures, await answers(*futures), strict=True):
            assert isinstance(outcome, wire.Result), outcome
            assert [item.digest for item in outcome.items] == digests_of(deployment, picture)
        [again] = await answers(client.submit_nowait([pictures[0]], request=given_up))
        assert isinstance(again, wire.Failed), "its id is not taken again"
        await lends(client, {})
