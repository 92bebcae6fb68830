"""The model adapter interface, which a plug-in for a vision encoder implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tensorferry.codecs.errors import BadTensor
from tensorferry.codecs.tensors import View


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """The facts about an item that are known before its pixels are loaded."""

    index: int  #: its number within this call, which may have items of several requests
    modality: str
    grid: tuple[int, int, int]
    patches: int
    rows: int  #: number of embeddings that the adapter must produce
    content_hash: bytes


#: load(indices) -> pixels of those items, one after the other in the given order: (sum of patches, features).
#: It is called at most once an item. A single item comes without a copy if possible. With a GPU transport the pixels,
#: and the tensors of `out`, are on this rank's GPU: read and write them on the stream that is current in `encode`.
Load = Callable[[Sequence[int]], View]
#: out(index, name, shape, dtype) -> a writable tensor that travels on to the scheduler. It is called once for each
#: (index, name); the first output of an item has shape (rows, width).
Out = Callable[[int, str, tuple[int, ...], str], View]

#: The rest of a call of `encode` with work queued on a GPU. It waits for that work, and raises as `encode` does.
Finish = Callable[[], None]


class ModelAdapter(Protocol):
    """A vision encoder. It is built once a rank, as `Class(spec: ModelSpec, threads: int)`. `encode` runs off the event
    loop, one call at a time, on at most `threads` cores."""

    #: Whether the family may use the cuda_vmm feature transport (promise P7).
    supports_cuda_vmm_feature_transport: bool = False

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        """Encode the items that this rank owns, of one request or of several waiting ones (`encoder.batch_patches`).
        Without items, do nothing and load nothing.

        An exception concerns the whole call, and the rank continues. BadItem names an item whose content is at fault:
        its request fails, and the others' items come again without it. After any other exception each request's items
        come again alone, so that only the request at fault fails. So an item may be encoded more than once, and its
        result must not depend on the other items, but for rounding.

        Returns None when all outputs are written, or queued, and known to be right. An adapter that would have to wait
        for the GPU to know that may return a function that waits. Then `encode` may be called for the next items
        meanwhile, and the GPU need not idle. The function is called once, in another thread, and features are valid
        until it returns.
        """


@runtime_checkable
class WarmsUp(Protocol):
    """An adapter whose first calls would be slow. It is warmed up when its rank starts, before any request."""

    def warm_up(self, device: int | None) -> None:
        """Load kernels, compile. device: the GPU that features will be on; None: in host memory. An exception ends the
        rank."""


def split(features: View, items: Sequence[ItemInfo]) -> list[View]:
    """Cut the result of `load` for `items`, in that order, into one view (patches, features) an item, without copies.

    Raises BadTensor if the number of rows is not that of the items' patches.
    """
    expected = sum(item.patches for item in items)
    if not features.shape or features.shape[0] != expected:
        raise BadTensor(f"features have shape {features.shape}, and the items have {expected} patches")
    views, start = [], 0
    for item in items:
        views.append(features.rows(start, start + item.patches))
        start += item.patches
    return views
