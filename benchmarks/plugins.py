"""Processors and a model adapter that do next to nothing, so that what is left is the work of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorferry import ItemInfo, LimitsSpec, Load, ModelSpec, Out, Plan, View

#: 256 patches of 1,024 float32 values: a feature of 1 MiB. 64 rows of 1,024 float16 values: embeddings of 128 KiB.
PLAN = Plan("image", (1, 16, 16), (256, 1024), "float32", 64, size=(600, 400))
_PAGE_NBYTES = 4096


class NoProcessor:
    """Makes the same feature of anything, and writes a byte in each of its pages."""

    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        pass

    def plan(self, data: bytes | memoryview) -> Plan:
        return PLAN

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        out.data[::_PAGE_NBYTES] = 1
        return bytes(32)

    def largest_item_nbytes(self) -> int:
        return PLAN.nbytes

    def rows_for(self, width: int, height: int) -> int:
        return PLAN.rows

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        return 224, 224


class SmallImage(NoProcessor):
    """Makes the same feature of anything: 64 black patches, as `patch-vit` takes them."""

    PLAN = Plan("image", (1, 8, 8), (64, 1176), "float32", 16)

    def plan(self, data: bytes | memoryview) -> Plan:
        return self.PLAN

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        out.data[:] = 0
        return bytes(32)


class NoAdapter:
    """Borrows the feature, reads a byte in each of its pages, and makes embeddings of whatever was there."""

    supports_cuda_vmm_feature_transport = False

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        pass

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        for item in items:
            read = load([item.index]).data[::_PAGE_NBYTES].sum()
            out(item.index, "embeddings", (item.rows, 1024), "float16").data[::_PAGE_NBYTES] = read
