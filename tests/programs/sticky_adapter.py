"""A fingerprint adapter that breaks this process's CUDA context when it meets an item of `FATAL` rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.fingerprint import Fingerprint

FATAL = 13  #: rows of an item


class Sticky(Fingerprint):
    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        super().encode(items, load, out)
        if any(item.rows == FATAL for item in items):
            torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
            torch.cuda.synchronize()
