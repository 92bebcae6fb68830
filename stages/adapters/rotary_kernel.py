"""`rotary.turned` as one kernel, which reads and writes queries and keys once. It needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def turn(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys in place. The work is queued on the current stream of the current device, their own.

    qkv: (patches, 3, heads, head width), contiguous. cos, sin: float32 (patches, head width / 2), contiguous.
    """
    patches, _, heads, width = qkv.shape
    half = width // 2
    _turn[(patches,)](
        qkv,
        cos,
        sin,
        qkv.stride(0),
        HEADS=2 * heads,  # of a patch, queries and keys stand side by side
        HALF=half,
        HEADS_BLOCK=triton.next_power_of_2(2 * heads),
        HALF_BLOCK=triton.next_power_of_2(half),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """All queries and keys of one patch. Source of the arithmetic: see `rotary`."""
    patch = tl.program_id(0).to(tl.int64)  # 2^31 values are 620,000 patches of Qwen3-VL
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    component = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < HEADS) & (component < HALF)
    place = qkv + patch * stride + head * (2 * HALF) + component
    first = tl.load(place, mask=inside).to(tl.float32)
    second = tl.load(place + HALF, mask=inside).to(tl.float32)
    angle = patch * HALF + component
    c = tl.load(cos + angle, mask=component < HALF)
    s = tl.load(sin + angle, mask=component < HALF)
    tl.store(place, (first * c - second * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * c + first * s).to(qkv.dtype.element_ty), mask=inside)
