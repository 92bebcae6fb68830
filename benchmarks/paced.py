"""A model adapter whose calls take a set time for each patch, so that no other load decides how long."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.fingerprint import Fingerprint


class Paced(Fingerprint):
    """`fingerprint`, and then a rest of `model.options.ms_per_1000_patches`."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(msgspec.structs.replace(spec, options={}), threads)
        self._s_per_patch = float(spec.options["ms_per_1000_patches"]) / 1e6

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        super().encode(items, load, out)
        threading.Event().wait(self._s_per_patch * sum(item.patches for item in items))
