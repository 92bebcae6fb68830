"""What an encoder rank made of contents that it has seen: a cache of embeddings, bounded in bytes.

It takes a content hash at its word: that equal hashes mean equal tensors is every processor's promise
(`Processor.write`). The model and its settings are no part of a key, as they are the rank's own, for life.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import View

Outputs = Mapping[str, View]  #: what an adapter made of one item, by name


class Content(NamedTuple):
    """All that decides an item's embeddings: items of equal content share them."""

    content_hash: bytes
    modality: str
    grid: tuple[int, int, int]
    rows: int
    dtype: int  #: of its features, and their shape: the hash should cover both, and these cost nothing
    shape: tuple[int, ...]

    @classmethod
    def of(cls, item: wire.Item, payload: wire.Payload) -> Content:
        return cls(item.content_hash, item.modality, item.grid, item.rows, payload.dtype, payload.shape)


@dataclass(slots=True)
class _Entry:
    outputs: Outputs
    nbytes: int
    pins: int = 0


class EmbeddingCache:
    """See the module. Least recently used goes first; what is pinned stays. One thread uses it."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.nbytes = 0  #: kept now; never more than the capacity
        self._entries: OrderedDict[Content, _Entry] = OrderedDict()  # the least recently used first

    def __contains__(self, content: Content) -> bool:
        return content in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def pinned(self, content: Content) -> Iterator[Outputs]:
        """The embeddings of a content, to read and not to write; kept for the length of the block.

        Raises KeyError for a content that is not `in` the cache.
        """
        entry = self._entries[content]
        self._entries.move_to_end(content)
        entry.pins += 1
        try:
            yield entry.outputs
        finally:
            entry.pins -= 1

    def put(self, content: Content, outputs: Outputs) -> bool:
        """Keep these, which are the cache's own from now on, and let go of others for them.

        False, and nothing changes, where they are in already, or there is no room beside what is pinned.
        """
        nbytes = sum(view.nbytes for view in outputs.values())
        if content in self._entries or not self._make_room(nbytes):
            return False
        self._entries[content] = _Entry(outputs, nbytes)
        self.nbytes += nbytes
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Whether so much fits, after the least recently used that stand in the way are gone."""
        idle = [(content, entry.nbytes) for content, entry in self._entries.items() if not entry.pins]
        if self.nbytes - sum(size for _, size in idle) + nbytes > self.capacity_nbytes:
            return False
        for content, size in idle:
            if self.nbytes + nbytes <= self.capacity_nbytes:
                break
            del self._entries[content]
            self.nbytes -= size
        return True
