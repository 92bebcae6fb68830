"""What the deployment file says reaches the parts of a stage process that it is about."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.pool.attached_pool import Imported
from tensorferry.codecs.pool.pool import Pool
from tensorferry.pipeline.deployment.spec import Deployment, PoolSpec
from tensorferry.pipeline.pools.own_pool import PoolShare
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.start_stage import opened

SHARE = PoolShare(1 << 20, 8, 0, "pool.budget_mb")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path that leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


def deployment(folder: Path, transport: Any, **pool: Any) -> Deployment:
    return Deployment(name="a", transport=transport, runtime_dir=str(folder / "run"), pool=PoolSpec(**pool))


@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_vmm"])
@pytest.mark.parametrize("stage", ["encoder", "scheduler"])
async def test_p8_a_stage_accepts_no_tokenizer_that_cannot_do_its_transport(
    folder: Path, transport: str, stage: str
) -> None:
    described = deployment(folder, transport)
    inbox = Runtime.of(described).inbox("tokenizer", 0)
    tokenizer = wire.Origin("tokenizer", 0, 5)
    async with opened(described, stage, 0) as opened_stage:
        for capabilities, taken in ((("pool", "shm"), False), (("pool", transport), True)):
            opened_stage.peers.hear(wire.Hello(wire.PROTOCOL_VERSION, tokenizer, inbox, capabilities))
            assert opened_stage.peers.knows(tokenizer) is taken


@pytest.mark.parametrize("cached", [True, False])
async def test_l6_readers_keep_handles_as_the_deployment_says(
    folder: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def attach(export: Any, fds: Any, consumer: int, device: int | None, cache_handles: bool) -> Any:
        asked.append(cache_handles)
        raise AttachRefused("it was only asked")

    monkeypatch.setattr(Imported, "local", attach)
    async with opened(deployment(folder, "shm", handle_cache=cached), "scheduler", 0) as stage:
        with Pool.create(1 << 16, 8) as pool:
            export, fds = pool.export()
            with pytest.raises(AttachRefused):
                stage.reader.attach(export, fds)
            for fd in fds:
                os.close(fd)
    assert asked == [cached]


async def test_l5_a_stage_counts_what_its_full_pool_had_no_room_for_and_warns_once(folder: Path) -> None:
    async with opened(deployment(folder, "shm"), "tokenizer", 0, SHARE) as stage:
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                with stage.publisher.draft([("uint8", (2 << 20,))]) as draft:
                    assert draft.transport == "inline"
        assert stage.counters.value("pool_full_fallbacks") == 3
    [warning] = [line for line in lines if line["event"] == "pool_full"]
    assert (warning["tensor_nbytes"], warning["pool_nbytes"]) == (2 << 20, 1 << 20)
    assert "raise pool.budget_mb" in warning["remedy"]
