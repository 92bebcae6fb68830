"""The periodic work of each stage process: heartbeats, and unmapping pools that nobody needs."""

from __future__ import annotations

import asyncio
import time

import structlog
import zmq

from tensorferry.codecs.errors import FerryError
from tensorferry.pipeline.process.stage import Stage

log = structlog.get_logger()

UPKEEP_S = 1.0  #: between two looks at what peers' elastic pools have retired, at most


async def beat(stage: Stage) -> None:
    """Send heartbeats, and restore the files by which later processes find this one."""
    well = True
    while True:
        stage.peers.beat(stage.work.in_flight(), stage.gauges())
        try:
            _mend(stage)
            well = True
        except (FerryError, OSError, zmq.ZMQError) as problem:
            if well:
                log.error("runtime_directory_lost", problem=str(problem), remedy="no new process can connect meanwhile")
            well = False
        await asyncio.sleep(stage.deployment.timeouts.heartbeat_s)


def _mend(stage: Stage) -> None:
    """Make the files again that were removed from the runtime directory, such as by a cleaner of /tmp: processes that
    start later look for us there. Raises FerryError, OSError, ZMQError."""
    origin = stage.origin
    if stage.runtime.keep(origin.stage, origin.rank, stage.locks):
        log.warning("lock_file_recreated", directory=str(stage.runtime.directory))
    if stage.settings.mend():
        log.warning("settings_file_recreated", directory=str(stage.runtime.directory))
    for mend in stage.mends:
        if mend():
            log.warning("socket_file_recreated", directory=str(stage.runtime.directory))


async def forget(stage: Stage) -> None:
    """Unmap the pools of dead producers once no request can need them, and the chunks that living producers have
    retired."""
    seen_at: dict[int, float] = {}
    while True:
        if stage.deployment.transport == "cuda_vmm":
            await _keep_up(stage)
        now = time.monotonic()
        seen_at = {pool: seen_at.get(pool, now) for pool in stage.reader.orphans()}
        for pool, at in seen_at.items():
            if now - at > stage.deployment.limits.request_timeout_s:
                await asyncio.to_thread(stage.reader.detach, pool)
                log.info("pool_detached", pool=pool)
        await asyncio.sleep(min(UPKEEP_S, stage.deployment.timeouts.heartbeat_s))


async def _keep_up(stage: Stage) -> None:
    try:
        await asyncio.to_thread(stage.reader.upkeep)
    except FerryError as problem:  # of one chunk; a request that needs it gets the error again
        stage.outlive(problem)
        stage.counters.count("chunks_unmapped")
        log.warning("chunk_not_mapped", problem=str(problem))
