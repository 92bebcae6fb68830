"""Rotary position embedding of queries and keys of any dtype, in float32.

Component i of a head and component i + half a head rotate by the angle of their patch. (Source: transformers 5.17,
`apply_rotary_pos_emb_vision`, which Qwen2.5-VL, Qwen3-VL and Kimi-K2.5 share; the order of the angles differs.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import structlog
import torch

log = structlog.get_logger()

#: (queries, keys and values; cos; sin): rotates queries and keys in place.
Turn: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Angles(NamedTuple):
    """Cosines and sines of every patch, for half of a head's components: float32 (patches, head width / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor


def angles_of(angles: torch.Tensor) -> Angles:
    """Take cosine and sine of angles: radians, float32 (patches, head width / 2)."""
    return Angles(angles.cos(), angles.sin())


def turned(qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries and keys. Returns them and the values, (patches, heads, head width) each.

    qkv: (patches, 3, heads, head width), contiguous; it may be overwritten. In torch this takes nine passes over the
    memory of queries and keys, in float32, which is a sixth of the time of a whole tower on an H200. So a GPU has a
    kernel for it, and torch.compile makes its own kernel of the torch code.
    """
    if qkv.is_cuda and not torch.compiler.is_compiling() and (turn := _kernel(qkv.device)) is not None:
        turn(qkv, angles.cos, angles.sin)
        q, k, v = qkv.unbind(1)
        return q, k, v
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    cos, sin = (table[:, None, None] for table in angles)
    q, k = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype).unbind(1)
    return q, k, qkv[:, 2]


def has_kernel(device: torch.device) -> bool:
    """Whether a kernel rotates tensors on this device."""
    return device.type == "cuda" and _kernel(device) is not None


@cache
def _kernel(device: torch.device) -> Turn | None:
    """Try `rotary_kernel.turn` once; if it fails, log the reason and return None. It needs Triton, which comes with
    torch's builds for CUDA, and a C compiler, which Triton needs."""
    try:
        from tensorferry.stages.adapters.rotary_kernel import turn

        turn(torch.zeros(1, 3, 1, 2, device=device), *torch.zeros(2, 1, 1, device=device))
    except Exception as problem:  # Triton and its compilers raise many kinds, and the torch code remains
        log.warning("rotary_kernel_missing", device=str(device), problem=f"{type(problem).__name__}: {problem}")
        return None
    return turn
