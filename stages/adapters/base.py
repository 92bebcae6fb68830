"""What a model adapter is: the one thing to write to plug in a vision encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tensorferry.codecs.errors import BadTensor
from tensorferry.codecs.tensors import View


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """What an adapter knows of an item before its pixels are loaded."""

    index: int  #: its number within this call, where items of several requests may come together
    modality: str
    grid: tuple[int, int, int]
    patches: int
    rows: int  #: embeddings it must produce
    content_hash: bytes


#: load(indices) -> pixels of those items, one after the other in the given order: (sum of patches, features).
#: Called at most once an item. One item comes without a copy where that is possible. With a GPU transport they, and
#: what `out` gives, are on this rank's GPU: read and write them on the stream that is current in `encode`.
Load = Callable[[Sequence[int]], View]
#: out(index, name, shape, dtype) -> a writable tensor that travels on to the scheduler. Called once for each
#: (index, name); the first output of an item has shape (rows, width).
Out = Callable[[int, str, tuple[int, ...], str], View]

#: What is left of a call of `encode` whose work is queued on a GPU: waits for it, and raises as `encode` does.
Finish = Callable[[], None]


class ModelAdapter(Protocol):
    """A vision encoder. Built once a rank, as `Class(spec: ModelSpec, threads: int)`; `encode` runs off the
    event loop, one call at a time, on at most `threads` cores."""

    #: Whether the family may use the cuda_vmm feature transport (promise P7).
    supports_cuda_vmm_feature_transport: bool = False

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        """Encode the items this rank owns, of one request or of several that wait together (`encoder.batch_patches`);
        without items, do nothing and load nothing.

        Raises for the whole call; the rank lives on. BadItem names an item whose content is at fault: its request
        fails, and the others' items come again without it. After any other exception each request's items come again
        alone, and it is told which one fails. So an item may be encoded more than once, and its result must not
        depend, but for rounding, on what it is encoded with.

        Returns None when everything is written, or queued, and known to be right. An adapter that has queued all of it
        and would have to wait for the GPU to know that returns what waits, and the GPU need not idle: `encode` may be
        called for the next items meanwhile. It is called once, in another thread; features are valid until it returns.
        """


@runtime_checkable
class WarmsUp(Protocol):
    """An adapter whose first calls would be slow. It is warmed up when its rank starts, before that takes requests."""

    def warm_up(self, device: int | None) -> None:
        """Load kernels, compile. device: the GPU that features will be on; None: in host memory. What it raises ends
        the rank."""


def split(features: View, items: Sequence[ItemInfo]) -> list[View]:
    """What `load` gave for `items`, in that order, cut into one view (patches, features) an item; no copies.

    Raises BadTensor where the rows are not those of the items.
    """
    expected = sum(item.patches for item in items)
    if not features.shape or features.shape[0] != expected:
        raise BadTensor(f"features of shape {features.shape} for items of {expected} patches")
    views, start = [], 0
    for item in items:
        views.append(features.rows(start, start + item.patches))
        start += item.patches
    return views
