"""Attention within the stretches of a packed batch, in one call for any number and any lengths of stretches.

Equal stretches are the rows of a dense batch. Others go to torch's variable-length attention if it is available, and
otherwise one after the other through dense attention. It needs bfloat16 or float16, a GPU of compute capability 8.0 or
more, and heads of a multiple of 8 up to 256 wide (torch 2.11, `torch.nn.attention.varlen`, which uses FlashAttention).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import library
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

_HALF = (torch.bfloat16, torch.float16)


class Stretches(NamedTuple):
    """The stretches of patches in a batch; each attends only to itself. It is a tuple for torch.compile."""

    ends: torch.Tensor  #: int32 (stretches + 1,), from 0 to the number of patches, on the device of the patches
    ends_on_host: torch.Tensor  #: the same on the host, for torch without variable-length attention
    equal: int  #: the number of stretches if all are equally long; else 0
    longest: int  #: patches of the longest


def stretches_of(ends: torch.Tensor, device: torch.device) -> Stretches:
    """Copy `Stretches.ends`, which are on the host, to a device. The copy is queued on its current stream."""
    lengths = np.diff(ends.numpy())
    longest = int(lengths.max())
    moved = (ends.pin_memory() if device.type == "cuda" else ends).to(device, non_blocking=True)
    return Stretches(moved, ends, len(lengths) if int(lengths.min()) == longest else 0, longest)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stretches: Stretches) -> torch.Tensor:
    """Attend within each stretch, without a mask. q, k, v: (patches, heads, head width). Returns (patches, width)."""
    if stretches.equal:
        shape = (stretches.equal, stretches.longest, *q.shape[1:])
        q, k, v = (x.view(shape).transpose(1, 2) for x in (q, k, v))  # (stretches, heads, patches, head width)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
    mixed: torch.Tensor = _attend_unequal(q, k, v, stretches.ends, stretches.ends_on_host, stretches.longest)
    return mixed.flatten(1)


def takes_unequal(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether torch's variable-length attention takes these heads."""
    if device.type != "cuda" or dtype not in _HALF or head_width % 8 or head_width > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@library.custom_op("tensorferry::attend_unequal", mutates_args=())
def _attend_unequal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, ends_on_host: torch.Tensor, longest: int
) -> torch.Tensor:
    """Attend within stretches of any lengths. As a custom operator of torch it is opaque to a compiled tower, which
    thus takes any lengths. Returns (patches, heads, head width)."""
    if takes_unequal(q.device, q.dtype, q.shape[-1]):
        found = varlen_attn(q, k, v, ends, ends, longest, longest)
        assert isinstance(
            found, torch.Tensor
        )  # of the two that it can answer, what it does when asked for nothing else
        return found
    mixed = q.new_empty(q.shape)
    for start, end in pairwise(ends_on_host.numpy()):
        one, other, values = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        mixed[start:end] = functional.scaled_dot_product_attention(one, other, values).squeeze(0).transpose(0, 1)
    return mixed


@_attend_unequal.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, ends_on_host: torch.Tensor, longest: int
) -> torch.Tensor:
    return q.new_empty(q.shape)
