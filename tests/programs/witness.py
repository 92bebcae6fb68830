"""A processor, an adapter and an engine that note what they were given: JSON lines in the file `options.journal`."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import LimitsSpec, ModelSpec, SchedulerSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.fingerprint import Fingerprint
from tensorferry.stages.engines.base import EngineRequest, EngineResult
from tensorferry.stages.engines.discard import Discard
from tensorferry.stages.processors.base import Plan
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor


def note(journal: object, **fields: object) -> None:
    """One write, so that processes do not meet in a line."""
    with open(str(journal), "ab", buffering=0) as file:
        file.write(json.dumps(fields | {"pid": os.getpid()}).encode() + b"\n")


def lies_in_a_pool(view: View) -> bool:
    """Whether these bytes are shared memory, and no copy."""
    address: int = view.data.__array_interface__["data"][0]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            start, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
            if start <= address < end:
                return "/memfd:" in line
    return False


class Processor(Qwen2VLProcessor):
    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        super().__init__({}, limits)
        self._journal = options["journal"]

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        note(self._journal, who="processor", in_a_pool=lies_in_a_pool(out))
        return super().write(data, plan, out)


class Adapter(Fingerprint):
    """Notes what a `load` has allocated at its peak, beside the bytes of the features that it gave."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(msgspec.structs.replace(spec, options={}), threads)
        self._journal = spec.options["journal"]

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        def watched(indices: Sequence[int]) -> View:
            tracemalloc.start()
            try:
                view = load(indices)
                _, peak_nbytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            [reader] = [thing for thing in gc.get_objects() if isinstance(thing, Reader)]
            note(
                self._journal,
                who="adapter",
                items=len(indices),
                nbytes=view.nbytes,
                peak_nbytes=peak_nbytes,
                in_a_pool=lies_in_a_pool(view),
                cache_handles=reader._cache_handles,
            )
            return view

        super().encode(items, watched, out)


class Engine(Discard):
    def __init__(self, spec: SchedulerSpec) -> None:
        super().__init__({})
        self._journal = spec.options["journal"]

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        for request in batch:
            items = [sorted(embeddings) for embeddings in request.embeddings]
            note(self._journal, who="engine", request=request.request.hex(), items=items)
        answers: Any = await super().run(batch)
        return answers
