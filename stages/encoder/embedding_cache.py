"""A cache of an encoder rank's embeddings by content, bounded in bytes.

It relies on content hashes: every processor promises that equal hashes mean equal tensors (`Processor.write`). The
model and its settings are not part of a key, because a rank never changes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import View

Outputs = Mapping[str, View]  #: an adapter's outputs for one item, by name


class Content(NamedTuple):
    """Everything that an item's embeddings depend on. Items of equal content share them."""

    content_hash: bytes
    modality: str
    grid: tuple[int, int, int]
    rows: int
    dtype: int  #: of its features, as `shape` is. The hash should cover both; comparing them too costs nothing
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
    """See the module. It drops the least recently used entry first, and no pinned one. One thread uses it."""

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
        """Keep these outputs, which the cache owns from now on, and drop others for them.

        Returns False and changes nothing if the content is in the cache, or if pinned entries leave no room.
        """
        nbytes = sum(view.nbytes for view in outputs.values())
        if content in self._entries or not self._make_room(nbytes):
            return False
        self._entries[content] = _Entry(outputs, nbytes)
        self.nbytes += nbytes
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Drop the least recently used entries until so much fits. False, and nothing changes, if it cannot."""
        idle = [(content, entry.nbytes) for content, entry in self._entries.items() if not entry.pins]
        if self.nbytes - sum(size for _, size in idle) + nbytes > self.capacity_nbytes:
            return False
        for content, size in idle:
            if self.nbytes + nbytes <= self.capacity_nbytes:
                break
            del self._entries[content]
            self.nbytes -= size
        return True
