"""Promises L7 and L8: each reader acknowledges for itself, and proxies declare what they were lent for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from tensorferry.codecs.errors import BadMessage, StaleLease
from tensorferry.codecs.messages import Inline, Payload, Proxy
from tensorferry.codecs.pool.declared import check_declared
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES

ONE = Proxy(7, 3, 5, 0, CODES["uint8"], (4,))
OTHER = Proxy(7, 4, 5, 0, CODES["uint8"], (4,))
INLINE = Inline(0, CODES["uint8"], (4,))


def of(proxy: Proxy, consumers: int, uses: int) -> Proxy:
    return msgspec.structs.replace(proxy, consumers=consumers, uses=uses)


@pytest.mark.parametrize(
    ("payloads", "consumers"),
    [([], 1), ([INLINE], 3), ([ONE, OTHER, INLINE], 1), ([of(ONE, 2, 2), of(ONE, 2, 2), of(OTHER, 2, 1)], 2)],
    ids=["nothing", "inline", "two leases", "two tensors of a lease"],
)
def test_l8_a_proxy_that_declares_its_true_uses_is_taken(payloads: Sequence[Payload], consumers: int) -> None:
    check_declared(payloads, consumers)


@pytest.mark.parametrize(
    ("payloads", "consumers"),
    [
        ([of(ONE, 2, 1)], 1),
        ([of(ONE, 1, 1)], 2),
        ([of(ONE, 1, 2)], 1),
        ([ONE, ONE], 1),
        ([ONE, of(OTHER, 1, 3)], 1),
        ([of(ONE, 1, 2), of(ONE, 1, 1)], 1),
    ],
    ids=["more readers", "fewer readers", "more releases", "fewer releases", "the second lease", "in disagreement"],
)
def test_l8_any_other_number_is_refused(payloads: Sequence[Payload], consumers: int) -> None:
    with pytest.raises(BadMessage, match=r"slot \d generation 5 of pool 7 declares \d consumers and \d uses"):
        check_declared(payloads, consumers)


def test_l7_each_reader_acknowledges_for_itself_and_for_nobody_else() -> None:
    with Pool.create(1 << 20, 8) as pool, Reader() as first, Reader() as second:
        columns = [pool.admit(*reader.attach(*pool.export())) for reader in (first, second)]
        with Publisher(pool, inline_below_nbytes=0).publish(np.frombuffer(b"1234", np.uint8)) as draft:
            proxies = [draft.dispatch(column, [], consumers=2)[0] for column in columns]
        first.acknowledge(proxies[0])
        with pytest.raises(StaleLease):
            first.acknowledge(proxies[1])  # the second reader's acknowledgement is not the first one's to give
        pool.reclaim()
        assert pool.statistics().lent_slots == 1
        with second.open(proxies[1]) as view:
            assert bytes(view.data) == b"1234"
        pool.reclaim()
        assert pool.statistics().lent_slots == 0


def test_l8_a_refused_lease_comes_back_whatever_releases_it_declares() -> None:
    with Pool.create(1 << 20, 8) as pool, Reader() as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        with Publisher(pool, inline_below_nbytes=0).publish(np.frombuffer(b"1234", np.uint8)) as draft:
            [proxy] = draft.dispatch(column, [], uses=3)
        reader.acknowledge(proxy)
        pool.reclaim()
        assert pool.statistics().lent_slots == 1
        reader.refuse([proxy, INLINE])
        reader.refuse([proxy])
        pool.reclaim()
        assert pool.statistics().lent_slots == 0
