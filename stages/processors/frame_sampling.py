"""The sampling of a video's frames and their size, by the rules of Qwen2-VL (and 2.5) and of Qwen3-VL.

Source: transformers 5.17 to 5.24, `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor`: their `sample_frames` and
`resize`, the latter with `cap_pixels_per_frame=False`, their default before 5.22. Results equal
theirs to the frame and to the pixel. Only a single frame differs: they cannot take one, and here it counts as one
temporal patch of equal frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tensorferry.stages.processors.options import Qwen2VLOptions

Size = tuple[int, int]  #: width, height


@dataclass(frozen=True, slots=True)
class Rule:
    """The video rule of a family."""

    #: (options, frames there are, frames to have) -> their numbers
    pick: Callable[[Qwen2VLOptions, int, float], list[int]]
    #: Whether video_min_pixels and video_max_pixels are those of all frames together, rather than of one.
    counts_frames: bool


def sampled(options: Qwen2VLOptions, frames: int, fps: float | None) -> list[int]:
    """The numbers of the sampled frames, in order. Frames repeat if there are fewer than the model takes.

    frames: their number, at least one. fps: frames a second. None: all frames are taken, or video_max_frames of them at
    even distances.
    """
    if fps is None:
        picked = _evenly(frames, min(frames, options.video_max_frames))
    else:
        picked = RULES[options.video_rule].pick(options, frames, frames / fps * options.video_fps)
    return picked or [0]


def padded(picked: list[int], temporal_patch_size: int) -> list[int]:
    """Repeat the last frame until the temporal patch is whole."""
    return picked + picked[-1:] * (-len(picked) % temporal_patch_size)


def resized_together(options: Qwen2VLOptions, frames: int, size: Size) -> Size:
    """The size of every frame, by the rule that counts the pixels of all frames together."""
    width, height = size
    factor, least, most = options.patch_size * options.merge_size, options.video_min_pixels, options.video_max_pixels
    temporal = options.temporal_patch_size
    frames = max(frames, temporal)
    if min(size) < factor:
        grow = max(factor / height, factor / width)
        width, height = int(width * grow), int(height * grow)
    across, down = round(width / factor) * factor, round(height / factor) * factor
    rounded = round(frames / temporal) * temporal
    if rounded * across * down > most:
        shrink = math.sqrt(frames * height * width / most)
        across = max(factor, math.floor(width / shrink / factor) * factor)
        down = max(factor, math.floor(height / shrink / factor) * factor)
    elif rounded * across * down < least:
        grow = math.sqrt(least / (frames * height * width))
        across, down = math.ceil(width * grow / factor) * factor, math.ceil(height * grow / factor) * factor
    return across, down


def _whole_patches(options: Qwen2VLOptions, frames: int, wanted: float) -> list[int]:
    """Qwen2-VL's rule: whole temporal patches only, from the first frame on."""
    temporal = options.temporal_patch_size
    most = min(options.video_max_frames, frames) // temporal * temporal
    count = math.floor(min(max(wanted, options.video_min_frames), most, frames) / temporal) * temporal
    # In float32, as torch.arange has them: the last digit decides which side of a whole number a step falls on.
    return [int(np.float32(number * (frames / count))) for number in range(count)]


def _first_to_last(options: Qwen2VLOptions, frames: int, wanted: float) -> list[int]:
    """Qwen3-VL's rule: evenly from the first frame to the last; their number may be odd."""
    return _evenly(frames, min(max(int(wanted), options.video_min_frames), options.video_max_frames, frames))


def _evenly(frames: int, count: int) -> list[int]:
    picked: list[int] = np.linspace(0, frames - 1, count).round().astype(int).tolist()
    return picked


RULES: Mapping[str, Rule] = {
    "qwen2-vl": Rule(_whole_patches, counts_frames=False),
    "qwen3-vl": Rule(_first_to_last, counts_frames=True),
}
