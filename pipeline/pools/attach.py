"""Maps peers' pools beside everything else, and tries again where that failed."""

from __future__ import annotations

import asyncio
from itertools import count

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.memory.cuda_vmm import NoFabric
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.backoff import backoff_s
from tensorferry.pipeline.peers.handshake import Peers
from tensorferry.pipeline.pools import broker

ATTACH_S = 10.0  #: for a peer's pool to be mapped
AGAIN_S, LONGEST_AGAIN_S = 1.0, 60.0  #: until a next try of one that could not be; doubled each time


class Attaching:
    """See the module. A pool that cannot be mapped now may be mapped later, when memory or a descriptor is free again;
    the peer sends inline meanwhile."""

    def __init__(self, reader: Reader, tasks: asyncio.TaskGroup) -> None:
        self._reader, self._tasks = reader, tasks
        self._under_way: dict[int, asyncio.Task[None]] = {}  # by pool

    def begin(self, announcement: wire.Pool, peers: Peers) -> None:
        """Map an announced pool, unless that is under way. `peers.attached` gets the result, and each new reason."""
        pool = announcement.description.pool
        if pool not in self._under_way:  # else it was announced again, and is answered when that is done
            self._under_way[pool] = self._tasks.create_task(self._attach(announcement, peers), name="attach")
            self._under_way[pool].add_done_callback(lambda _: self._under_way.pop(pool))

    def cancel(self) -> None:
        for task in self._under_way.values():
            task.cancel()

    async def _attach(self, announcement: wire.Pool, peers: Peers) -> None:
        producer = announcement.origin
        said = ""
        for waits in count():
            refusal = await self._refusal(announcement, peers.origin)
            if refusal != said or not refusal:
                peers.attached(producer, refusal)
            if not refusal:
                return
            said = refusal
            await asyncio.sleep(backoff_s(AGAIN_S, LONGEST_AGAIN_S, waits))
            if peers.living(producer.epoch) is None:
                return

    async def _refusal(self, announcement: wire.Pool, origin: wire.Origin) -> str:
        """Map a pool. Returns the reason why that failed; empty: the pool is mapped."""
        pool = announcement.description.pool
        if pool in self._reader.pools:  # it was announced again
            return ""
        try:
            await broker.attach(announcement.broker, origin, pool, self._reader, timeout_s=ATTACH_S)
        except NoFabric:  # it was chosen, and is never weakened
            raise
        except FerryError as problem:
            return str(problem) or type(problem).__name__
        except OSError as problem:  # descriptors have run out here
            return f"it cannot be reached: {problem.strerror}"
        return ""
