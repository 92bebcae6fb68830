"""Plug-ins that each make one mistake, of those that people make: which one, an item's rows or a request's tokens say.

An item of other rows, and a request of other tokens, goes through them as through `fingerprint`, `qwen2-vl`, `discard`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tensorferry.codecs.errors import BadItem
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import LimitsSpec, ModelSpec, SchedulerSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.fingerprint import Fingerprint
from tensorferry.stages.engines.base import EngineRequest, EngineResult
from tensorferry.stages.engines.discard import Discard
from tensorferry.stages.processors.base import BadMedia, Plan
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor

SURROGATE = "\ud800"  #: in file names that are no UTF-8, for instance
Slip = Callable[..., Any]


def end() -> None:
    sys.exit(3)


def fail(problem: BaseException) -> None:
    raise problem


#: By the rows of an item: what the adapter does with it.
ADAPTER: dict[int, Slip] = {
    20: lambda item, load, out: next(iter(())),
    21: lambda item, load, out: end(),
    22: lambda item, load, out: fail(BadItem(None, "of none")),  # type: ignore[arg-type]
    23: lambda item, load, out: fail(BadItem(1 << 70, "of one far away")),
    24: lambda item, load, out: fail(ValueError(SURROGATE)),
    25: lambda item, load, out: out(item.index, "n" * 65, (item.rows, 1), "uint8"),
    26: lambda item, load, out: out(item.index, "", (item.rows, 1), "uint8"),
    27: lambda item, load, out: np.negative(a := load([item.index]).numpy(), out=a),
    28: lambda item, load, out: out(item.index, "embeddings", (item.rows, 1 << 20), "uint8"),
    29: lambda item, load, out: out(item.index, "embeddings", (item.rows,) + 8 * (1,), "uint8"),
}
#: By the rows of an item: what the processor plans.
PLANNED: dict[int, Callable[[Plan], Any]] = {
    30: lambda plan: next(iter(())),
    31: lambda plan: replace(plan, modality="m" * 65),
    32: lambda plan: replace(plan, grid=tuple(map(float, plan.grid))),  # type: ignore[arg-type]
    33: lambda plan: replace(plan, rows=np.int64(plan.rows)),
    34: lambda plan: None,
    35: lambda plan: fail(BadMedia(SURROGATE)),
}
#: And what it says of the content it has written.
WRITTEN: dict[int, Callable[[], Any]] = {36: lambda: None, 37: lambda: bytes(15), 38: end, 39: lambda: next(iter(()))}
#: By the tokens that a request asks for: what the engine answers.
ENGINE: dict[int, Callable[[], Any]] = {
    102: lambda: None,
    103: lambda: EngineResult(-1),
    104: lambda: EngineResult(10**30),
    105: lambda: EngineResult(1, (bytes(65),)),
    106: lambda: EngineResult(1, (bytes(8),) * 2),
    107: lambda: EngineResult(1.5),  # type: ignore[arg-type]
    108: lambda: ValueError(SURROGATE),
    109: end,
}


class Adapter(Fingerprint):
    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(spec, threads)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        for item in items:
            if item.rows in ADAPTER:
                ADAPTER[item.rows](item, load, out)
        if others := [item for item in items if item.rows not in ADAPTER]:
            super().encode(others, load, out)


class Processor(Qwen2VLProcessor):
    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        super().__init__({**options, "dtype": "float32"}, limits)

    def plan(self, data: bytes | memoryview) -> Plan:
        plan = super().plan(data)
        planned: Plan = PLANNED[plan.rows](plan) if plan.rows in PLANNED else plan
        return planned

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        content = super().write(data, plan, out)
        written: bytes = WRITTEN[plan.rows]() if plan.rows in WRITTEN else content
        return written


class Engine(Discard):
    def __init__(self, spec: SchedulerSpec) -> None:
        super().__init__(spec.options)

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        answers = await super().run(batch)
        return [
            ENGINE[request.output_tokens]() if request.output_tokens in ENGINE else answer
            for request, answer in zip(batch, answers, strict=True)
        ]
