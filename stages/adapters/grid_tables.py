"""The tables of the grids in a batch, for its forward pass. They are made once a grid and kept on the device.

With these tables transformers' towers loop over no images and read nothing back from the GPU.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch

Grid: TypeAlias = tuple[int, int, int]  #: patches along time, height, width


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one grid, under the names of the arguments of a tower's `forward`."""

    lines: Mapping[str, torch.Tensor]  #: a line for each patch
    stretches: Mapping[str, Sequence[int]]  #: lengths of the stretches of patches; each attends only to itself
    orders: Mapping[str, torch.Tensor] = field(default_factory=dict)  #: a permutation of the grid's blocks, from 0 on
    blocks: int = 0  #: of the grid; needed if there are orders

    def to(self, device: torch.device) -> Tables:
        """Copy the tables to a device; the copies are queued on its current stream."""
        return Tables(_moved(self.lines, device), self.stretches, _moved(self.orders, device), self.blocks)


def joined(tables: Sequence[Tables]) -> dict[str, torch.Tensor]:
    """Join the tables of a batch, grid by grid. Stretches become their boundaries, int32 from 0 on. These stay on the
    host, because torch needs them there to split."""
    batch = {name: _cat([each.lines[name] for each in tables]) for name in tables[0].lines}
    firsts = list(accumulate((each.blocks for each in tables), initial=0))
    for name in tables[0].orders:
        batch[name] = _cat([each.orders[name] + first for each, first in zip(tables, firsts, strict=False)])
    for name in tables[0].stretches:
        lengths = (length for each in tables for length in each.stretches[name])
        batch[name] = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    return batch


class TableCache:
    """A cache of the tables of the latest grids, on one device at a time."""

    def __init__(self, make: Callable[[Grid], Tables], most_patches: int = 1 << 18) -> None:
        """make: makes tables in host memory. most_patches: bound for all kept grids, of 64 to 128 bytes a patch."""
        self._make, self._most_patches = make, most_patches
        self._kept: OrderedDict[Grid, Tables] = OrderedDict()
        self._patches = 0
        self._device = torch.device("cpu")

    def get(self, grids: Sequence[Grid], device: torch.device) -> list[Tables]:
        if device != self._device:
            self._kept.clear()
            self._patches, self._device = 0, device
        return [self._one(grid) for grid in grids]

    def _one(self, grid: Grid) -> Tables:
        if grid in self._kept:
            self._kept.move_to_end(grid)
            return self._kept[grid]
        made = self._kept[grid] = self._make(grid).to(self._device)
        self._patches += math.prod(grid)
        while self._patches > self._most_patches:
            self._patches -= math.prod(self._kept.popitem(last=False)[0])
        return made


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _moved(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    if device.type == "cuda":  # from page-locked memory, else the host waits for the copy
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
