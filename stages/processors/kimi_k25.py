"""Kimi-K2.5's images: reduced if they have too many patches, padded to whole tokens, in raster order.

Sources: transformers 5.17, `Kimi_K25ImageProcessor` and its `navit_resize`, for sizes, padding and order; Moonshot's
preprocessor_config.json for 0.5 as mean and deviation (the class has ImageNet's for defaults). On the host Pillow
resizes (bicubic), as in Moonshot's own processor; transformers' class uses torchvision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from tensorferry.codecs.tensors import DTYPES, View
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.plugin import read_options
from tensorferry.stages.processors.base import BadMedia, Plan
from tensorferry.stages.processors.image import header, upright
from tensorferry.stages.processors.normalise import CHANNELS, NORMALISATIONS, levels_of
from tensorferry.stages.processors.options import KIMI_MERGE, KIMI_PATCH, KimiK25Options

#: Pixels of a token's side.
_FACTOR = KIMI_PATCH * KIMI_MERGE
_NORMALISATION = "half"

Size = tuple[int, int]  #: (width, height)


class KimiK25Processor:
    """See `base.Processor`. An image of h x w patches has grid (1, h, w) and h * w / 4 tokens. No image is enlarged,
    and every aspect ratio is accepted: a side has at least one pixel."""

    writes_on_gpu = True

    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        """options: the fields of KimiK25Options. Raises ConfigError that names an unknown or wrong one."""
        self.options = read_options("tokenizer.options", "kimi-k25", KimiK25Options, options)
        self.limits = limits
        self.features = CHANNELS * KIMI_PATCH**2
        self._levels = levels_of(self.options.dtype, _NORMALISATION)
        self._settings = f"kimi-k25 1 {self.options.dtype}"

    def plan(self, data: bytes | memoryview) -> Plan:
        found = header(data, self.limits)
        return replace(self._plan(canvas_of(self.resized(found.width, found.height))), size=(found.width, found.height))

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        """Decode, resize, pad and write. The hash is over the padded pixels, with sizes and settings. For GPU memory,
        where the GPU resizes and a level may differ by one, it is over the decoded pixels."""
        image = upright(data, self.limits)
        size = self.resized(image.width, image.height)
        canvas = canvas_of(size)
        if self._plan(canvas) != plan or (out.dtype, out.shape) != (plan.dtype, plan.shape):
            raise BadMedia(f"the image has {image.width}x{image.height} pixels and does not match its plan")
        if out.on_host:
            resized = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
            pixels = np.asarray(_padded(resized, canvas))
            self._write_patches(pixels, out)
        else:
            from tensorferry.stages.processors.gpu_patches import write_patches  # which imports torch

            pixels = np.asarray(image)
            write_patches(pixels, size, out, KIMI_PATCH, 1, 1, *NORMALISATIONS[_NORMALISATION], canvas=canvas)
        where = "" if out.on_host else f"gpu {image.width}x{image.height} "
        digest = hashlib.blake2b(f"{self._settings} {where}{size[0]}x{size[1]}\n".encode(), digest_size=32)
        digest.update(np.ascontiguousarray(pixels).data)
        return digest.digest()

    def resized(self, width: int, height: int) -> Size:
        """The (width, height) of an image after resizing and before padding. It is never larger; one ratio applies to
        both sides, which are rounded down, to at least one pixel.

        The ratio counts whole patches only. So an image with incomplete last patches has slightly more than
        max_patches.
        """
        if width < 1 or height < 1:
            raise BadMedia(f"the picture is {width}x{height}; each side needs a pixel")
        longest = self.options.max_side_patches * KIMI_PATCH
        patches = max(1.0, height // KIMI_PATCH) * max(1.0, width // KIMI_PATCH)
        scale = min(1.0, math.sqrt(self.options.max_patches / patches), longest / height, longest / width)
        return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)

    def rows_for(self, width: int, height: int) -> int:
        if width * height > self.limits.item_pixels:
            raise BadMedia(f"{width}x{height} is over the limit of {self.limits.item_pixels} pixels")
        across, down = canvas_of(self.resized(width, height))
        return across * down // _FACTOR**2

    def size_for(self, rows: int, aspect: float) -> Size:
        """See `base.Processor`: the number of rows comes first, then the aspect ratio. The size is one that is neither
        reduced nor padded."""
        longest, most = self._most_tokens()
        wanted = min(max(rows, 1), most)
        for distance in range(most):
            for count in (wanted - distance, wanted + distance):
                if 1 <= count <= most and (sides := _sides(count, aspect, longest)):
                    return sides[0] * _FACTOR, sides[1] * _FACTOR
        raise BadMedia(f"no size has about {rows} rows")  # never happens: one row always has a size

    def largest_item_nbytes(self) -> int:
        """See `base.Processor`.

        If an image is reduced to x by y patches, not whole numbers, (x - 1) * (y - 1) is less than max_patches, because
        the patches are rounded down before they are counted. Padding adds less than a token to each side.
        """
        longest, merge, most = self.options.max_side_patches, KIMI_MERGE, self.options.max_patches
        largest = 0
        for down in range(merge, _up(longest, merge) + 1, merge):
            inside = down - merge - 1  # less than y - 1
            across = _up(longest, merge) if inside <= 0 else min(_up(longest, merge), _up(most / inside + 1, merge))
            largest = max(largest, down * across)
        return largest * self.features * DTYPES[self.options.dtype]

    def _most_tokens(self) -> tuple[int, int]:
        """The most tokens of a side, and of an image, without reduction and padding."""
        longest = self.options.max_side_patches // KIMI_MERGE
        return longest, min(longest**2, self.options.max_patches // KIMI_MERGE**2)

    def _plan(self, canvas: Size) -> Plan:
        across, down = (side // KIMI_PATCH for side in canvas)
        patches = across * down
        return Plan("image", (1, down, across), (patches, self.features), self.options.dtype, patches // KIMI_MERGE**2)

    def _write_patches(self, pixels: npt.NDArray[np.uint8], out: View) -> None:
        """Normalise (height, width, 3) pixels into `out`: patches row by row, and in a patch channel by channel. One
        row of patches at a time keeps the intermediate values in the CPU's cache."""
        across = pixels.shape[1] // KIMI_PATCH
        bands = out.data.view(self._levels.dtype).reshape(-1, across, CHANNELS, KIMI_PATCH, KIMI_PATCH)
        for row, target in enumerate(bands):
            band = pixels[row * KIMI_PATCH : (row + 1) * KIMI_PATCH].reshape(KIMI_PATCH, across, KIMI_PATCH, CHANNELS)
            for channel, levels in enumerate(self._levels):
                target[:, channel] = levels.take(band[..., channel].transpose(1, 0, 2))


def canvas_of(size: Size) -> Size:
    """The (width, height) of whole tokens that holds a picture of this size."""
    return _up(size[0], _FACTOR), _up(size[1], _FACTOR)


def _up(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def _padded(picture: Image.Image, canvas: Size) -> Image.Image:
    """Extend a picture with black to its right and below it."""
    if picture.size == canvas:
        return picture
    padded = Image.new("RGB", canvas)
    padded.paste(picture)
    return padded


def _sides(count: int, aspect: float, longest: int) -> Size | None:
    """Whole (across, down) with this product, neither over `longest`, nearest in shape to `aspect` = across / down."""
    sides = [(count // down, down) for down in range(1, longest + 1) if not count % down and count // down <= longest]
    return min(sides, key=lambda pair: abs(math.log(pair[0] / pair[1] / aspect)), default=None)
