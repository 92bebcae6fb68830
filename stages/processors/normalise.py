"""The 256 levels of a colour, normalised by a mean and a deviation, as the bits of a tensor's dtype."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Mean and standard deviation of red, green and blue over CLIP's training set (openai/CLIP, clip.py).
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CHANNELS = len(CLIP_MEAN)
#: Name of the option -> (mean, deviation) of red, green and blue, where white is 1.
NORMALISATIONS = {"clip": (CLIP_MEAN, CLIP_STD), "half": ((0.5,) * CHANNELS, (0.5,) * CHANNELS)}


def levels_of(dtype: str, normalisation: str) -> npt.NDArray[np.float32 | np.uint16]:
    """The normalised values of the 256 levels of each channel: (3, 256) of float32, or of bfloat16's bits.

    The arithmetic has the order and precision of transformers: level times 1/255 in float64, rounded to float32; then
    minus the mean, and divided by the deviation, in float32.
    """
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(values, np.float32)[:, np.newaxis] for values in NORMALISATIONS[normalisation])
    levels = (scaled - mean) / std
    return levels if dtype == "float32" else bfloat16_bits(levels)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite float32 values rounded to bfloat16, half to even, as bits; numpy has no such type."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
