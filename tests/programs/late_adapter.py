"""A fingerprint adapter whose calls take between nothing and `model.options.most_ms`, at random."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence

import msgspec

from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.fingerprint import Fingerprint


class Late(Fingerprint):
    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(msgspec.structs.replace(spec, options={}), threads)
        self._most_s = float(spec.options["most_ms"]) / 1e3
        self._random = random.Random(os.getpid())

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        super().encode(items, load, out)
        threading.Event().wait(self._random.uniform(0, self._most_s))
