"""A discard engine that fails the requests which ask for `FAILS` output tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.pipeline.deployment.spec import SchedulerSpec
from tensorferry.stages.engines.base import EngineRequest, EngineResult
from tensorferry.stages.engines.discard import Discard

FAILS = 666


class Odd(Discard):
    def __init__(self, spec: SchedulerSpec) -> None:
        super().__init__(spec.options)

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        answers = await super().run(batch)
        return [
            ArithmeticError("as asked") if request.output_tokens == FAILS else answer
            for request, answer in zip(batch, answers, strict=True)
        ]
