"""The images of Qwen2-VL and later models: resized to whole patches, normalised, cut into patches in merge order.

Results equal those of transformers' Qwen2VLImageProcessorPil (5.17 to 5.24), bit for bit in float32 and with the same
Pillow, for every image that both accept (`image.py` has the policy for orientation and modes). Resize rule, constants
and order are Qwen2-VL's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from tensorferry.codecs.tensors import DTYPES, View
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.plugin import read_options
from tensorferry.stages.processors.base import BadMedia, Plan, Video
from tensorferry.stages.processors.frame_sampling import RULES, padded, resized_together, sampled
from tensorferry.stages.processors.image import header, upright
from tensorferry.stages.processors.normalise import CHANNELS, NORMALISATIONS, levels_of
from tensorferry.stages.processors.options import Qwen2VLOptions
from tensorferry.stages.processors.video_frames import Footage, footage_of

#: The longer side over the shorter, at most; Qwen2-VL refuses more.
MAX_ASPECT = 200


class Qwen2VLProcessor:
    """See `base.Processor`. A still image of h x w patches has grid (1, h, w) and h * w / merge_size² tokens.

    Sides are rounded to multiples of patch_size * merge_size, and the picture is kept between min_pixels and
    max_pixels. So smaller images are enlarged, a single pixel to 56x56; see `resized`.
    """

    writes_on_gpu = True

    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        """options: the fields of Qwen2VLOptions. Raises ConfigError that names an unknown or wrong one."""
        self.options = read_options("tokenizer.options", "qwen2-vl", Qwen2VLOptions, options)
        self.limits = limits
        patch, merge, frames = self.options.patch_size, self.options.merge_size, self.options.temporal_patch_size
        self.factor = patch * merge  #: pixels of a token's side
        self.features = CHANNELS * frames * patch**2
        self._levels = levels_of(self.options.dtype, self.options.normalisation)
        self._settings = f"qwen2-vl 2 {self.options.normalisation} {self.options.dtype} {patch} {merge} {frames}"

    def plan(self, data: bytes | memoryview) -> Plan:
        found = header(data, self.limits)
        return replace(self._plan(*self.resized(found.width, found.height)), size=(found.width, found.height))

    def plan_video(self, video: Video) -> Plan:
        """Read the headers of the sampled frames; see `video_frames.py` and `frame_sampling.py`. Raises BadMedia."""
        *_, plan = self._watched(video)
        return plan

    def write_video(self, video: Video, plan: Plan, out: View) -> bytes:
        """Decode, resize and write, one frame after the other; see `write`.

        A patch has temporal_patch_size frames, one behind the other; the last frame is repeated until the patch is
        whole. Pillow resizes (bicubic), and transformers uses torchvision's interpolation. On a photo they differ by up
        to 7 levels of 256 at sharp edges, and by 0.04 on average.
        """
        footage, numbers, size, found = self._watched(video)
        if found != plan or (out.dtype, out.shape) != (plan.dtype, plan.shape):
            raise BadMedia(f"the video has {len(numbers)} frames of {size[0]}x{size[1]} and does not match its plan")
        temporal, rows = self.options.temporal_patch_size, plan.grid[1] * plan.grid[2]
        digest = self._digest(f"video {plan.grid}" if out.on_host else f"gpu video {plan.grid}")
        with closing(footage.pictures(padded(numbers, temporal))) as pictures:
            for position, picture in enumerate(pictures):
                pixels = _pixels(picture, size, out)
                patch, frame = divmod(position, temporal)
                patches = out.rows(patch * rows, (patch + 1) * rows)
                self._write_patches(pixels, size, patches, slice(frame, frame + 1))
                digest.update(f"{picture.width}x{picture.height}\n".encode())
                digest.update(pixels.data)
        return digest.digest()

    def _watched(self, video: Video) -> tuple[Footage, list[int], tuple[int, int], Plan]:
        """A video, its sampled frames, the (width, height) after resizing, and the plan."""
        footage = footage_of(video, self.limits)
        numbers = sampled(self.options, footage.frames, footage.fps)
        size = self.size_of_frames(len(numbers), footage.size(numbers))
        return footage, numbers, size, self._plan(*size, -(-len(numbers) // self.options.temporal_patch_size))

    def size_of_frames(self, frames: int, size: tuple[int, int]) -> tuple[int, int]:
        """The (width, height) of every frame of a video after resizing."""
        _check_aspect(*size)
        if RULES[self.options.video_rule].counts_frames:
            return resized_together(self.options, frames, size)
        return self._resized(*size, self.options.video_min_pixels, self.options.video_max_pixels)

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        """Decode, resize and write; see `base.Processor`. It needs two bytes a pixel beside the picture itself.

        The hash is over the resized pixels, their size and the settings. So different files with equal tensors have
        equal hashes too. For GPU memory the GPU resizes (a level may differ by one from the host's), and the hash is
        over the decoded pixels.
        """
        image = upright(data, self.limits)
        size = self.resized(image.width, image.height)
        if self._plan(*size) != plan or (out.dtype, out.shape) != (plan.dtype, plan.shape):
            raise BadMedia(f"the image has {image.width}x{image.height} pixels and does not match its plan")
        sizes = f"{size[0]}x{size[1]}" if out.on_host else f"gpu {image.width}x{image.height} {size[0]}x{size[1]}"
        pixels = _pixels(image, size, out)
        del image  # up to 160 MB, and not needed while the tensor is written
        self._write_patches(pixels, size, out)
        digest = self._digest(sizes)
        digest.update(pixels.data)
        return digest.digest()

    def _digest(self, sizes: str) -> hashlib.blake2b:
        return hashlib.blake2b(f"{self._settings} {sizes}\n".encode(), digest_size=32)

    def rows_for(self, width: int, height: int) -> int:
        if width * height > self.limits.item_pixels:
            raise BadMedia(f"{width}x{height} is over the limit of {self.limits.item_pixels} pixels")
        across, down = self.resized(width, height)
        return across * down // self.factor**2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """The (width, height) of an image after resizing.

        Each side goes to the nearest multiple of patch_size * merge_size (half to even). If that is over max_pixels,
        one ratio reduces both sides, which are rounded down, to at least one multiple. If it is under min_pixels, one
        ratio enlarges both sides, which are rounded up. So very long images can stay somewhat over max_pixels.
        Raises BadMedia for empty sizes and for an aspect ratio over 200:1.
        """
        _check_aspect(width, height)
        return self._resized(width, height, self.options.min_pixels, self.options.max_pixels)

    def _resized(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        factor = self.factor
        across, down = round(width / factor) * factor, round(height / factor) * factor
        if across * down > max_pixels:
            shrink = math.sqrt((height * width) / max_pixels)
            across = max(factor, math.floor(width / shrink / factor) * factor)
            down = max(factor, math.floor(height / shrink / factor) * factor)
        elif across * down < min_pixels:
            grow = math.sqrt(min_pixels / (height * width))
            across = math.ceil(width * grow / factor) * factor
            down = math.ceil(height * grow / factor) * factor
        return across, down

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        """See `base.Processor`: the number of rows comes first, then the aspect ratio.

        `resized` does not change the returned size. A count that min_pixels or max_pixels excludes gives the nearest
        allowed count; so does one that only an aspect ratio over 200:1 could make, such as a large prime.
        """
        token_pixels = self.factor**2
        fewest = -(-self.options.min_pixels // token_pixels)
        most = self.options.max_pixels // token_pixels
        wanted = min(max(rows, fewest), most)
        for distance in range(most - fewest + 1):
            for count in (wanted - distance, wanted + distance):
                if fewest <= count <= most and (sides := _sides(count, aspect)):
                    return sides[0] * self.factor, sides[1] * self.factor
        raise BadMedia(f"no size has about {rows} rows")  # options allow one token number, and it is a large prime

    def largest_item_nbytes(self) -> int:
        """See `base.Processor`. It covers every image that is not refused."""
        factor, least, most = self.factor, self.options.min_pixels, self.options.max_pixels
        # Reduced: within max_pixels, unless the short side is held at one token.
        pixels = max(most, factor * max(factor, math.floor(math.sqrt(most * MAX_ASPECT) / factor) * factor))
        # Enlarged: sides a x b = min_pixels, each rounded up to the next multiple.
        longest = math.ceil(math.sqrt(least * MAX_ASPECT) / factor)
        for tokens in range(1, math.isqrt(least) // factor + 2):
            across = min(longest, math.ceil(least / ((tokens - 1) * factor) / factor)) if tokens > 1 else longest
            pixels = max(pixels, tokens * across * factor**2)
        return pixels * CHANNELS * self.options.temporal_patch_size * DTYPES[self.options.dtype]

    def _plan(self, width: int, height: int, temporal: int = 0) -> Plan:
        """The plan of an image of this size after resizing, or of a video with this number of temporal patches."""
        across, down = width // self.options.patch_size, height // self.options.patch_size
        patches = across * down * (temporal or 1)
        rows = patches // self.options.merge_size**2
        modality = "video" if temporal else "image"
        return Plan(modality, (temporal or 1, down, across), (patches, self.features), self.options.dtype, rows)

    def _write_patches(
        self, pixels: npt.NDArray[np.uint8], size: tuple[int, int], out: View, into: slice = slice(None)
    ) -> None:
        """Normalise (height, width, 3) pixels into `out`. The order is row by row of merge_size x merge_size blocks of
        patches, then the patches of a block, the channels of a patch, and the (equal) frames of a channel.

        size: the (width, height) of the pixels; a GPU resizes them to it. into: the frames to write. One row of blocks
        at a time keeps the intermediate values in the CPU's cache.
        """
        patch, merge, frames = self.options.patch_size, self.options.merge_size, self.options.temporal_patch_size
        if not out.on_host:
            from tensorferry.stages.processors.gpu_patches import write_patches  # which imports torch

            write_patches(pixels, size, out, patch, merge, frames, *NORMALISATIONS[self.options.normalisation], into)
            return
        band = patch * merge
        blocks = pixels.shape[1] // band
        bands = out.data.view(self._levels.dtype).reshape(-1, blocks * merge**2, CHANNELS, frames, patch**2)
        for row, target in enumerate(bands):
            cut = pixels[row * band : (row + 1) * band].reshape(merge, patch, blocks, merge, patch, CHANNELS)
            by_channel = cut.transpose(5, 2, 0, 3, 1, 4).reshape(CHANNELS, blocks * merge**2, 1, patch**2)
            for channel, levels in enumerate(self._levels):
                target[:, channel, into] = levels.take(by_channel[channel])


def _pixels(picture: Image.Image, size: tuple[int, int], out: View) -> npt.NDArray[np.uint8]:
    """The pixels of a tensor, (height, width, 3): the resized picture, or for GPU memory the picture itself."""
    return np.ascontiguousarray(picture.resize(size, Image.Resampling.BICUBIC) if out.on_host else picture)


def _check_aspect(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise BadMedia(f"the picture is {width}x{height}; each side needs a pixel")
    aspect = max(width, height) / min(width, height)
    if aspect > MAX_ASPECT:
        raise BadMedia(f"{width}x{height} is {aspect:.1f}:1; the limit of the aspect ratio is {MAX_ASPECT}:1")


def _sides(count: int, aspect: float) -> tuple[int, int] | None:
    """Whole (across, down) with this product, nearest in shape to `aspect` = across / down and within 200:1."""
    sides = [
        pair
        for side in range(1, math.isqrt(count) + 1)
        if not count % side and count // side <= MAX_ASPECT * side
        for pair in ((side, count // side), (count // side, side))
    ]
    return min(sides, key=lambda pair: abs(math.log(pair[0] / pair[1] / aspect)), default=None)
