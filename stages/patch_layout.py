"""The layout of patches between a processor and a vision tower, which is known without importing either."""

from __future__ import annotations

from typing import NamedTuple


class Patches(NamedTuple):
    """How an item's pixels are cut into patches."""

    features: int  #: numbers of a patch
    merge: int  #: patches a side of the block that becomes one embedding
    blocks: bool = True  #: patches come block by block; else row by row, over the whole frame
