"""Checks of an item's grid, for encoders that make one embedding of each block of patches."""

from __future__ import annotations

from tensorferry.codecs.errors import BadItem
from tensorferry.stages.adapters.base import ItemInfo


def check_grid(item: ItemInfo, merge: int, *, frames_become_one: bool = False) -> None:
    """Raise BadItem unless grid, patches and rows of an item agree.

    merge: patches on a side of the block that becomes one embedding. An item without patches is refused too, because
    nothing bounds its grid (0 frames of 2^30 x 2^30). frames_become_one: the frames of an item share one frame's
    embeddings.
    """
    frames, height, width = item.grid
    if not item.patches:
        raise BadItem(item.index, f"grid {item.grid} has no patches")
    if frames * height * width != item.patches or height % merge or width % merge:
        raise BadItem(item.index, f"grid {item.grid} does not make {item.patches} patches in {merge} x {merge} blocks")
    if item.rows * merge * merge * (frames if frames_become_one else 1) != item.patches:
        raise BadItem(item.index, f"{item.patches} patches do not make {item.rows} embeddings")
