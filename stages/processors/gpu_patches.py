"""Resize, normalise and cut pixels into patches on the GPU whose memory receives them.

Nothing here waits for the GPU: the decoded picture goes up through page-locked memory, and all work is queued on the
current stream of the thread. (Source of the arithmetic: transformers, Qwen2VLImageProcessorFast. It also resizes by
torch's bicubic interpolation with antialiasing, and rounds to whole levels.)
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tensorferry.codecs.memory.pinned import pinned_copy
from tensorferry.codecs.tensors import View


@torch.inference_mode()
def write_patches(
    pixels: npt.NDArray[np.uint8],
    size: tuple[int, int],
    out: View,
    patch: int,
    merge: int,
    frames: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    into: slice = slice(None),
    *,
    canvas: tuple[int, int] | None = None,
) -> None:
    """Write a decoded picture, (height, width, 3), into `out`, (patches, 3 * frames * patch * patch), in GPU memory.

    size: the (width, height) to resize to, multiples of patch * merge unless there is a canvas. mean, std: of each
    channel; white is 1. into: the frames of the patches to write. canvas: the (width, height) that is cut into patches;
    it is black to the right of the resized picture and below it. The order is `Qwen2VLProcessor`'s; with a merge of 1
    it is raster order.
    """
    height, width, channels = pixels.shape
    device = out.data.device
    with torch.cuda.device(device):
        flat = pinned_copy(np.ascontiguousarray(pixels).reshape(-1)).to(device, non_blocking=True)
        image = flat.view(height, width, channels).permute(2, 0, 1).unsqueeze(0).float()
        if (width, height) != size:
            image = functional.interpolate(image, (size[1], size[0]), mode="bicubic", antialias=True)
        if canvas is not None:
            image = functional.pad(image, (0, canvas[0] - size[0], 0, canvas[1] - size[1]))
            size = canvas
        shares = image[0].round_().clamp_(0, 255) * (1 / 255)
        normal = (shares - _column(mean, device)) / _column(std, device)
        down, across = size[1] // (patch * merge), size[0] // (patch * merge)
        blocks = normal.view(channels, down, merge, patch, across, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
        target = out.torch().view(down, across, merge, merge, channels, frames, patch, patch)[:, :, :, :, :, into]
        target.copy_(blocks.unsqueeze(5).expand_as(target))
    out.join()


@cache
def _column(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """One number for each channel, as (channels, 1, 1) on a device."""
    return torch.tensor(values, device=device).view(-1, 1, 1)
