"""A processor that makes patches at the cost of a copy, and a tower that is on a GPU whatever the transport is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tensorferry.codecs.tensors import View, view_of
from tensorferry.pipeline.deployment.spec import LimitsSpec, ModelSpec
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out
from tensorferry.stages.adapters.qwen3_vl import Qwen3VL
from tensorferry.stages.processors.base import Plan

FEATURES = 3 * 2 * 16 * 16
MOST_PATCHES = 64 * 64


def patches_of(count: int) -> torch.Tensor:
    """bfloat16 (count, FEATURES), always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, FEATURES, generator=generator).to(torch.bfloat16)


class ReadyPatches:
    """An image is its grid in ASCII, as in `64x32`; its patches are there, and are copied to where they are wanted."""

    writes_on_gpu = True

    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        self._sources: dict[torch.device, torch.Tensor] = {}

    def plan(self, data: bytes | memoryview) -> Plan:
        height, width = map(int, bytes(data).split(b"x"))
        return Plan("image", (1, height, width), (height * width, FEATURES), "bfloat16", height * width // 4)

    @torch.inference_mode()
    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        there = out.torch()
        if there.device not in self._sources:
            self._sources[there.device] = patches_of(MOST_PATCHES).to(there.device)
        there.copy_(self._sources[there.device][: plan.patches])
        return bytes(32)

    def largest_item_nbytes(self) -> int:
        return MOST_PATCHES * FEATURES * 2

    def rows_for(self, width: int, height: int) -> int:
        return MOST_PATCHES // 4

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        return 1024, 1024


class GpuTower(Qwen3VL):
    """Qwen3-VL's tower on its rank's GPU, or else on the first. Where features come in host memory, as with `transport:
    cpu`, it takes them up and brings the embeddings down, which is what a server does that has no other transport."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(spec, threads)
        self._device = torch.device("cuda", 0)

    def warm_up(self, device: int | None) -> None:
        self._device = torch.device("cuda", device or 0)
        super().warm_up(device or 0)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        def taken_up(indices: Sequence[int]) -> View:
            features = load(indices)
            if not features.on_host:
                return features
            return view_of(features.torch().to(self._device))

        return super().encode(items, taken_up, out)
