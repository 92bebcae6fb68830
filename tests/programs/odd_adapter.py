"""A fingerprint adapter that does something odd at a certain item: one of `GATED`, `MAD` or `LETHAL` rows.

`model.options.gate` is a path. While a file is there, a gated item is not encoded; `gate`.entered says that one waits.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.fingerprint import Fingerprint

GATED, MAD, LETHAL = 11, 13, 17  #: rows of an item


class Odd(Fingerprint):
    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(msgspec.structs.replace(spec, options={}), threads)
        self._gate = Path(str(spec.options["gate"]))

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        super().encode(items, load, out)
        if any(item.rows == GATED for item in items):
            self._gate.with_suffix(".entered").touch()
            while self._gate.exists():
                threading.Event().wait(0.002)
        if any(item.rows == LETHAL for item in items):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(item.rows == MAD for item in items):
            for reader in (thing for thing in gc.get_objects() if isinstance(thing, Reader)):
                for imported in reader._pools.values():
                    imported.acks.acknowledge(imported.slots - 1, 99)  # as a wrong stride would
