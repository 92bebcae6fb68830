"""Back-pressure: a worker takes on so many requests, items and bytes, and says `busy` beyond; memory stays bounded."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import MIB, LimitsSpec
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.pipeline.telemetry.timeline import reached
from tensorferry.stages.tokenizer.admission import Load, Overload, Rate

LIMITS = LimitsSpec(in_flight_requests=4, in_flight_items=10, in_flight_mb=1)
PATIENCE_S = 60.0
PING_S = 2.0  #: 200 ms are expected


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ((11, 0), (1, 0), "limits.in_flight_items"),
        ((0, MIB), (0, 1), "limits.in_flight_mb"),
        ((10, MIB), (0, 0), ""),
    ],
)
def test_b43_beyond_a_limit_the_key_is_named_and_one_alone_is_always_taken(
    first: tuple[int, int], second: tuple[int, int], key: str
) -> None:
    found = Load(LIMITS)
    found.take("first", *first)
    if key:
        with pytest.raises(Overload, match=key):
            found.take("second", *second)
        found.give_back("first")
    found.take("second", *second)


def test_b43_what_a_request_turns_out_to_need_counts_too() -> None:
    found = Load(LIMITS)
    found.take("alone", 1, 100)
    found.grow("alone", 5 * MIB)  # a request of its own may have more
    with pytest.raises(Overload, match=r"^5\.0 MiB in flight, 0\.0 more would come \(limits\.in_flight_mb\)$"):
        found.take("other", 1, 100)
    found.give_back("alone")
    found.take("other", 1, 100)
    found.take("third", 1, 100)
    with pytest.raises(Overload, match="in_flight_mb"):
        found.grow("third", MIB)
    found.grow("third", MIB - 200)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 2 * MIB), st.booleans())))
def test_b43_nothing_is_booked_twice_or_forgotten(events: list[tuple[int, int, int, bool]]) -> None:
    found, inside = Load(LIMITS), dict[int, tuple[int, int]]()
    for key, items, nbytes, grows in events:
        if key not in inside:
            try:
                found.take(key, items, nbytes)
                inside[key] = items, nbytes
            except Overload:
                pass
        elif grows:
            try:
                found.grow(key, nbytes)
                inside[key] = inside[key][0], inside[key][1] + nbytes
            except Overload:
                pass
        else:
            found.give_back(key)
            del inside[key]
        assert found.items == sum(items for items, _ in inside.values())
        assert found.nbytes == sum(nbytes for _, nbytes in inside.values())
        assert len(inside) <= LIMITS.in_flight_requests
        assert len(inside) <= 1 or found.items <= LIMITS.in_flight_items


def test_a_client_that_asks_too_often_hears_when_to_try_again() -> None:
    rate = Rate(10)
    for _ in range(10):  # what it may send in a second it may send at once
        rate.take("ann", 5.0)
    with pytest.raises(Overload, match=r"more than 10 requests a second \(limits\.client_requests_per_s\)") as full:
        rate.take("ann", 5.0)
    assert full.value.retry_ms == 100
    rate.take("eve", 5.0)  # others are not held up
    with pytest.raises(Overload) as full:
        rate.take("ann", 5.06)
    assert full.value.retry_ms == 40
    rate.take("ann", 5.1)
    rate.take("ann", 5.2)


@pytest.mark.parametrize("per_s", [1, 7, 1000])
def test_over_time_a_client_gets_its_rate_and_no_more(per_s: int) -> None:
    rate, taken, now = Rate(per_s), 0, 0.0
    while now < 10.0:
        try:
            rate.take("ann", now)
            taken += 1
        except Overload as full:
            now += full.retry_ms / 1000  # one that does as it is told
    assert 10 * per_s <= taken <= 11 * per_s + 1


def test_clients_that_went_away_are_forgotten() -> None:
    rate = Rate(1)
    for number in range(100_000):
        rate.take(number, number / 1000)  # a thousand new ones each second
    assert len(rate) < 3000
    Rate(None).take("ann", 0.0)


@pytest.mark.processes
@pytest.mark.timeout(180)
async def test_b43_a_flood_of_images_meets_busy_and_memory_stays_under_the_cap() -> None:
    """Its pixel tensors are 25 times the cap: without it they would all be made at once."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    with BytesIO() as file_of:
        Image.fromarray(pixels).resize((560, 560)).save(file_of, "JPEG", quality=50)
        image = file_of.getvalue()
    item_nbytes = 560 * 560 * 3 * 2 * 4  # float32, two frames
    requests, images, cap_mb = 28, 8, 60
    assert requests * images * item_nbytes > 25 * cap_mb * MIB
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        file = Path(folder) / "deployment.yaml"
        file.write_text(
            f"name: flood\ntransport: cpu\nruntime_dir: {folder}/run\nmodel: {{adapter: fingerprint}}\n"
            f"limits: {{in_flight_mb: {cap_mb}, request_mb: 512}}\ntelemetry: {{log_level: error}}\n"
        )
        deployment = load(file)
        async with Supervisor.running(deployment, file) as supervisor, Client.connect(deployment) as client:
            pids = list(supervisor.processes.values())
            before = {pid: _peak_nbytes(pid) for pid in pids}

            async def ask() -> int:
                for busy in range(100_000):
                    outcome = await client.submit([image] * images, deadline_s=PATIENCE_S)
                    if isinstance(outcome, wire.Result):
                        return busy
                    assert isinstance(outcome, wire.Busy), outcome
                    assert "limits.in_flight_mb" in outcome.reason
                    assert outcome.retry_ms > 0
                    await asyncio.sleep(outcome.retry_ms / 1000)
                raise AssertionError("never served")

            async with asyncio.timeout(2 * PATIENCE_S):
                refusals = await asyncio.gather(*(ask() for _ in range(requests)))
            assert sum(refusals) > 0
            grown = {pid: (_peak_nbytes(pid) - before[pid]) / MIB for pid in pids}
            # The cap, its bytes once more in ZeroMQ's hands and in the batch of the adapter, and the allocator's waste.
            assert max(grown.values()) < 4 * cap_mb, grown


@pytest.mark.processes
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_b43_who_asks_is_answered_while_large_images_are_decoded() -> None:
    """Decoding is beside the event loop: on it, there would be at most one answer after each image."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    with BytesIO() as file_of:
        Image.fromarray(pixels).resize((4000, 3000)).save(file_of, "JPEG")
        image = file_of.getvalue()
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        file = Path(folder) / "deployment.yaml"
        file.write_text(
            f"name: pings\ntransport: shm\nruntime_dir: {folder}/run\nmodel: {{adapter: fingerprint}}\n"
            "tokenizer: {workers: 1, threads: 2, options: {max_pixels: 262144}}\npool: {budget_mb: 64}\n"
            "telemetry: {log_level: error}\n"
        )
        deployment = load(file)
        async with Supervisor.running(deployment, file), Client.connect(deployment) as client:
            asked, answered_ns = client.submit_nowait([image] * 8, deadline_s=PATIENCE_S), []
            while not asked.done():
                await client.refresh(PING_S)
                answered_ns.append(time.monotonic_ns())
            result = asked.result()
            assert isinstance(result, wire.Result)
            at = reached(result.marks)
            assert sum(at["planned"] < ns < at["processed"] for ns in answered_ns) > 3 * 8


def _peak_nbytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(os.strerror(3))
