"""Pools that share no pages, over the stages' post and one that loses, repeats and shuffles; see `test_mail.py`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from tests.codecs.pool.elastic.mail.mail_pools import (
    CHUNK,
    FOREVER_S,
    Create,
    Stub,
    Until,
    connect,
    decode,
    digest,
    encode,
    out,
    publish,
    some,
    tell,
)

from tensorferry.codecs.memory.cuda_vmm import NoFabric
from tensorferry.codecs.messages import (
    Drain,
    Message,
    Origin,
    PoolDescription,
    Proxy,
    Released,
)
from tensorferry.codecs.messages import Pool as PoolAnnouncement
from tensorferry.codecs.pool.elastic.mail import Letter
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.pools import attach as attaching
from tensorferry.pipeline.pools.lease_mail import Post

# --- by the stages' post ----------------------------------------------------------------------------------------


class Peers:
    """As much of `pipeline.peers.Peers` as the post needs: those that are there by epoch, each with a letter box."""

    def __init__(self, *epochs: int) -> None:
        self.boxes: dict[int, list[Message]] = {epoch: [] for epoch in epochs}

    def living(self, epoch: int) -> int | None:
        return epoch if epoch in self.boxes else None

    def send(self, peer: int, message: Message) -> bool:
        self.boxes[peer].append(decode(encode(message)))
        return True


@pytest.mark.usefixtures("impatient")
async def test_the_post_brings_every_message_to_its_receiver(create: Create, reader: Reader, until: Until) -> None:
    """One of the pool's consumers is not among the peers, and nothing is said to it."""
    pool = create(2)
    there, here = Peers(reader.consumer), Peers(pool.producer)
    with Reader() as stranger:
        column, _ = connect(pool, reader), connect(pool, stranger)
        producer, consumer = Post(pool, stranger, there), Post(None, reader, here)  # type: ignore[arg-type]
        proxy = publish(pool, column, some(100))

        def bring(condition: Callable[[], bool]) -> bool:
            for boxes, to in ((there.boxes, consumer), (here.boxes, producer)):
                for box in boxes.values():
                    while box:
                        assert to.hear(box.pop())
            return condition()

        async def brought(condition: Callable[[], bool]) -> None:
            while not bring(condition):  # noqa: ASYNC110  (nobody calls when a word is stored)
                await asyncio.sleep(0)

        async with asyncio.timeout(20.0):
            carrying = [asyncio.create_task(post.carry(lambda: True)) for post in (producer, consumer)]
            await brought(lambda: reader.is_ready(proxy))
            reader.acknowledge(proxy)
            await brought(lambda: out(pool) == 0)
            await brought(lambda: reader.letters() == [])
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
        assert producer.hear(Drain(Origin("encoder", 0, 1))) is None
        assert consumer.hear(Released(proxy.pool, reader.consumer, ())) is False, "it has no pool: passed over"


async def test_p3_a_stage_ends_rather_than_read_less_than_was_chosen(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> int:
        raise NoFabric("cuMemCreate: CUDA_ERROR_NOT_PERMITTED")

    monkeypatch.setattr(attaching.broker, "attach", refuse)
    origin, description = Origin("tokenizer", 0, 5), PoolDescription(6, "cuda_vmm", CHUNK, 8, CHUNK)
    peers: Any = SimpleNamespace(origin=origin, attached=lambda origin, refusal: None)
    with pytest.RaisesGroup(pytest.RaisesExc(NoFabric, match="IMEX daemon")):
        async with asyncio.TaskGroup() as tasks:
            attaching.Attaching(reader, tasks).begin(PoolAnnouncement(origin, description, "/broker"), peers)


# --- everything at once -----------------------------------------------------------------------------------------


class UnreliablePost:
    """Brings messages: some never, some twice, and none in order."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._under_way: list[tuple[Callable[[Any], Letter | None], bytes, Callable[[Any], None]]] = []

    def take(self, letters: list[Letter], to: Callable[[Any], Any], back: Callable[[Any], None]) -> None:
        for letter in letters:
            for _ in range(self._chance.choice((0, 1, 1, 1, 2))):
                self._under_way.append((to, encode(letter.message), back))

    def bring(self, most: int) -> None:
        self._chance.shuffle(self._under_way)
        for _ in range(min(most, len(self._under_way))):
            to, message, back = self._under_way.pop()
            answer = to(decode(message))
            if answer is not None:
                self.take([answer], back, back)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(12))
def test_with_a_post_that_loses_and_repeats_every_byte_is_right_and_all_comes_back(
    create: Create, until: Until, seed: int, stub: Stub
) -> None:
    chance = random.Random(seed)
    post = UnreliablePost(chance)
    pool = create(4, slots=3)
    growing = pool.growth
    assert growing is not None
    waiting: list[tuple[Reader, Proxy, str]] = []
    with ExitStack() as readers:
        consumers = {connect(pool, one): one for one in [readers.enter_context(Reader()) for _ in range(2)]}
        read = 0
        for step in range(300):
            column, one = chance.choice(list(consumers.items()))
            match chance.randrange(6):
                case 0:
                    data = some(chance.randrange(1, 2 * CHUNK), step)
                    if not pool.fits([data.nbytes]):
                        continue
                    with Publisher(pool).publish(data) as draft:
                        if draft.transport == "inline":  # a chunk was given back since
                            continue
                        assert draft.prepared(column)
                        [proxy] = draft.dispatch(column, [])
                        assert isinstance(proxy, Proxy)
                        waiting.append((one, proxy, digest(data)))
                case 1:
                    post.take(pool.letters(), one.hear, one.hear)
                    post.take(one.letters(), pool.hear, one.hear)
                case 2:
                    one.upkeep()
                case 3:
                    pool.reclaim()
                    growing.idle_s = chance.choice((0.0, FOREVER_S))
                case 4:
                    post.bring(chance.randrange(4))
                case 5:
                    ready = [entry for entry in waiting if entry[0].is_ready(entry[1])]
                    for entry in ready[:2]:
                        waiting.remove(entry)
                        with entry[0].open(entry[1]) as view:
                            assert digest(view.data) == entry[2]
                        read += 1
            statistics = pool.statistics()
            assert statistics.mapped_nbytes + statistics.retiring_nbytes <= 4 * CHUNK
        growing.idle_s = 0.0

        def settled() -> bool:
            for one in consumers.values():
                tell(pool, *consumers.values())
                one.upkeep()
                for entry in [entry for entry in waiting if entry[0] is one and one.is_ready(entry[1])]:
                    waiting.remove(entry)
                    with one.open(entry[1]) as view:
                        assert digest(view.data) == entry[2]
            growing.look()
            statistics = pool.statistics()
            over = (out(pool), statistics.mapped_nbytes, statistics.retiring_nbytes) == (0, CHUNK, 0)
            return over and not waiting and not any(one.letters() for one in consumers.values())

        until(settled)
        assert read, "it was worth it"
        assert pool.statistics().acks_invalid == 0
