"""The payloads of one request, as an encoder rank reads them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, FerryError
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View, dtype_of


class Features:
    """Each payload is read once at most and released exactly once. What was read stays until `close`."""

    def __init__(self, reader: Reader, message: wire.Encode, frames: Sequence[Buffer]) -> None:
        self._reader, self._frames = reader, frames
        self._payloads = {index: item.features[0].payload for index, item in enumerate(message.items) if item.features}
        self._read: dict[int, View] = {}
        self._borrowed = ExitStack()

    def unread(self, index: int) -> wire.Payload | None:
        """An item's payload, unless it was read or released."""
        return self._payloads.get(index)

    def form(self, index: int) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of an item's features, checked against its payload, so that memory may be allocated for them.

        Raises as `Reader.is_ready`.
        """
        if (view := self._read.get(index)) is not None:
            return view.dtype, view.shape
        payload = self._payloads.get(index)
        if isinstance(payload, wire.Proxy):
            self._reader.is_ready(payload)
        elif payload is not None:
            open_inline(payload, self._frames)
        else:
            self._take(index)
        assert payload is not None
        return dtype_of(payload.dtype), payload.shape

    def borrow(self, index: int) -> View:
        """An item's features where they lie, until `close`. Raises as `Reader.open`."""
        if index not in self._read:
            self._read[index] = self._borrowed.enter_context(self._reader.open(self._take(index), self._frames))
        return self._read[index]

    def copy(self, index: int, into: View) -> None:
        """Copy an item's features into rows of a batch. Raises as `Reader.copy`."""
        if (read := self._read.get(index)) is not None:
            into.copy_from(read)
        else:
            self._reader.copy(self._take(index), into, self._frames)
            self._read[index] = into

    def acknowledge(self, index: int) -> None:
        """Release an item's features unread: its embeddings are known."""
        payload = self._payloads.pop(index, None)
        if payload is not None:
            with suppress(FerryError):  # the lease is over, or its producer is gone
                self._reader.acknowledge(payload)

    def close(self) -> None:
        """Return what is borrowed, and release what was never read."""
        self._read.clear()
        self._borrowed.close()
        for index in list(self._payloads):
            self.acknowledge(index)

    def _take(self, index: int) -> wire.Payload:
        payload = self._payloads.pop(index, None)
        if payload is None:
            raise BadItem(index, "its features were never sent")
        return payload
