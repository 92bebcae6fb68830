"""What passes between a processor and a vision tower, as far as either is known without importing it."""

from __future__ import annotations

from typing import NamedTuple


class Patches(NamedTuple):
    """How an item's pixels are cut up."""

    features: int  #: numbers of a patch
    merge: int  #: patches a side of the block that becomes one embedding
    blocks: bool = True  #: patches come block by block; else row by row, over the whole frame
