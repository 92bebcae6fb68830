"""The cache of embeddings: never more bytes than it may have, the least recently used go first, the pinned stay."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import CODES, View, view_of
from tensorferry.stages.encoder.embedding_cache import Content, EmbeddingCache


def content(number: int) -> Content:
    return Content(number.to_bytes(16, "big"), "image", (1, 4, 4), 4, CODES["float32"], (16, 3))


def outputs(number: int, nbytes: int = 100) -> dict[str, View]:
    """Of one item, two tensors that together have so many bytes."""
    first = nbytes // 2
    sizes = {"embeddings": first, "digest": nbytes - first}
    return {name: view_of(np.full(size, number, np.uint8)) for name, size in sizes.items()}


def test_what_was_put_is_found() -> None:
    cache = EmbeddingCache(100)
    assert content(1) not in cache
    assert cache.put(content(1), outputs(7))
    with cache.pinned(content(1)) as found:
        kept = {name: view.data.tolist() for name, view in found.items()}
    assert kept == {"embeddings": [7] * 50, "digest": [7] * 50}
    assert (len(cache), cache.nbytes) == (1, 100)


def test_the_least_recently_used_goes_first() -> None:
    cache = EmbeddingCache(300)
    for number in (1, 2, 3):
        cache.put(content(number), outputs(number))
    with cache.pinned(content(1)):
        pass
    cache.put(content(4), outputs(4))
    assert [number for number in range(5) if content(number) in cache] == [1, 3, 4]


def test_what_is_pinned_stays_until_its_last_block_ends() -> None:
    cache = EmbeddingCache(200)
    for number in (1, 2):
        cache.put(content(number), outputs(number))
    with cache.pinned(content(1)), ExitStack() as second:
        second.enter_context(cache.pinned(content(1)))
        assert cache.put(content(3), outputs(3))  # in the place of 2, which was used later
        assert not cache.put(content(4), outputs(4, 101))
        second.close()
        assert not cache.put(content(4), outputs(4, 101))
        assert content(3) in cache  # not let go of for what has no room all the same
    assert cache.put(content(4), outputs(4, 101))


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = EmbeddingCache(100)
    cache.put(content(1), outputs(1))
    assert not cache.put(content(2), outputs(2, 101))
    assert content(1) in cache
    assert not cache.put(content(1), outputs(1))
    assert cache.nbytes == 100


@pytest.mark.parametrize(
    "change",
    [
        {"content_hash": b"another content".rjust(32)},
        {"modality": "video"},
        {"grid": (4, 1, 4)},
        {"rows": 16},
        {"features": (wire.Tensor("features", wire.Inline(0, CODES["bfloat16"], (16, 3))),)},
        {"features": (wire.Tensor("features", wire.Inline(0, CODES["float32"], (16, 4))),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_all_that_decides_the_result_is_in_the_key(change: dict[str, object]) -> None:
    fields = dict(modality="image", grid=(1, 4, 4), rows=4, content_hash=bytes(32))
    fields["features"] = (wire.Tensor("features", wire.Inline(0, CODES["float32"], (16, 3))),)

    def of(**fields: object) -> Content:
        item = wire.Item(**fields)  # type: ignore[arg-type]
        return Content.of(item, item.features[0].payload)

    assert of(**fields) == of(**fields)
    assert of(**fields) != of(**(fields | change))


steps = st.tuples(st.sampled_from(["put", "pin", "unpin"]), st.integers(0, 5), st.integers(0, 120))


@given(st.lists(steps, max_size=40))
def test_whatever_comes_bytes_are_bounded_and_the_pinned_stay(steps: list[tuple[str, int, int]]) -> None:
    cache, pins = EmbeddingCache(200), dict[int, ExitStack]()
    sizes: dict[int, int] = {}
    with ExitStack() as all_pins:
        for step, number, nbytes in steps:
            if step == "put" and cache.put(content(number), outputs(number, nbytes)):
                sizes[number] = nbytes
            elif step == "pin" and content(number) in cache and number not in pins:
                pins[number] = all_pins.enter_context(ExitStack())
                pins[number].enter_context(cache.pinned(content(number)))
            elif step == "unpin" and number in pins:
                pins.pop(number).close()
            kept = {number for number in sizes if content(number) in cache}
            assert pins.keys() <= kept
            assert len(cache) == len(kept)
            assert cache.nbytes == sum(sizes[number] for number in kept) <= 200
