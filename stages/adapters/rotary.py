"""Rotary position embedding of queries and keys, in float32 whatever their dtype.

Component i of a head and component i + half of it turn by the angle of their patch. (Source: transformers 5.17,
`apply_rotary_pos_emb_vision`, which Qwen2.5-VL, Qwen3-VL and Kimi-K2.5 share; they differ in which angle stands where.)
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch


class Angles(NamedTuple):
    """Of every patch, for half of a head's components: float32 (patches, head width / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor


def angles_of(angles: torch.Tensor) -> Angles:
    """angles: in radians, float32 (patches, head width / 2)."""
    return Angles(angles.cos(), angles.sin())


def turned(qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys turned, and values: (patches, heads, head width) each.

    qkv: (patches, 3, heads, head width), contiguous; it may be overwritten. Written out in torch this is nine passes
    over the memory of queries and keys, in float32, a sixth of the time of a whole tower on an H200; so a GPU has a
    kernel for it, and torch.compile makes its own of what is written out.
    """
    if qkv.is_cuda and not torch.compiler.is_compiling() and (kernel := _kernel()) is not None:
        kernel.turn(qkv, angles.cos, angles.sin)
        q, k, v = qkv.unbind(1)
        return q, k, v
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    cos, sin = (table[:, None, None] for table in angles)
    q, k = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype).unbind(1)
    return q, k, qkv[:, 2]


def has_kernel() -> bool:
    """Whether Triton is there, as with torch's builds for CUDA."""
    return find_spec("triton") is not None


@cache
def _kernel() -> Any:
    if not has_kernel():
        return None
    from tensorferry.stages.adapters import rotary_kernel

    return rotary_kernel
