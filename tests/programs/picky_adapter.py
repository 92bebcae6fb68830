"""A fingerprint adapter that notes what each call is given, may be held back, and refuses or chokes on some items.

`model.options.folder` is a path. While a file `gate` is in it, a call does not go on, and `entered` says
that one waits. Each call adds a line to `calls-PID`: the rows of its items.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tensorferry.codecs.errors import BadItem
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.fingerprint import Fingerprint

POISONED, CRASHING = 11, 13  #: rows of an item


class Picky(Fingerprint):
    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(msgspec.structs.replace(spec, options={}), threads)
        self._folder = Path(str(spec.options["folder"]))

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        with (self._folder / f"calls-{os.getpid()}").open("a", encoding="ascii") as file:
            print(*(item.rows for item in items), file=file)
        (self._folder / "entered").touch()
        while (self._folder / "gate").exists():
            threading.Event().wait(0.002)
        super().encode(items, load, out)
        for item in items:
            if item.rows == POISONED:
                raise BadItem(item.index, "is poisoned")
            if item.rows == CRASHING:
                raise ZeroDivisionError("of which item, nobody knows")
