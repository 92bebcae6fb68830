"""Image sizes for a trace that only counts images.

The sizes of the images behind the Azure LMM trace were never published. ModServe (SoCC 2025, section 3.2) says of the
same service that width and height have a median around 500 pixels and a 95th percentile above 1000. This model has a
log-normal side with those two quantiles, times the aspect ratios of 20,288 photos (COCO 2017 test-dev,
`image_info_test-dev2017.json`, counted over its widths and heights). Landscape is as frequent as portrait, since width
and height are said to be alike. COCO's own sizes do not fit: its longer side is at most 640.
"""

from __future__ import annotations

import math
from bisect import bisect
from itertools import accumulate
from statistics import NormalDist

from tensorferry.pipeline.recording.request import Image
from tensorferry.replay.trace.seeds import choose

MEDIAN_PX = 500
P95_PX = 1050
#: Longer to shorter side -> its share of COCO photos, in thousandths.
ASPECTS = {(4, 3): 466, (3, 2): 418, (1, 1): 55, (16, 9): 47, (2, 1): 14}
#: So many equally likely sides stand for the whole distribution. A trace of a million images then needs only a few
#: hundred different JPEGs, which are made before the clock starts.
SIDES = 32


def _sides() -> list[float]:
    """Return the middles of SIDES equal parts of the log-normal distribution of the sides' geometric mean.

    Its deviation is a little below that of width and height, which the aspect ratios widen.
    """
    normal = NormalDist()
    aspect_variance = sum(share * math.log(w / h) ** 2 for (w, h), share in ASPECTS.items()) / sum(ASPECTS.values())
    sigma = math.sqrt((math.log(P95_PX / MEDIAN_PX) / normal.inv_cdf(0.95)) ** 2 - aspect_variance / 4)
    return [MEDIAN_PX * math.exp(sigma * normal.inv_cdf((part + 0.5) / SIDES)) for part in range(SIDES)]


class SizeModel:
    """A model that draws (width, height). With equal seeds, the same image of the same row has the same size."""

    name = "modserve"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sides = _sides()
        self._aspects = [math.sqrt(width / height) for width, height in ASPECTS]
        self._bounds = list(accumulate(ASPECTS.values()))

    def image(self, place: int | str, index: int) -> Image:
        """Return the image, as `ImageModel` specifies."""
        width, height = self.draw(place, index)
        return Image(width=width, height=height)

    def draw(self, place: int | str, index: int) -> tuple[int, int]:
        """Return the size of image `index` of the request at `place`."""
        number = choose(self._seed, "size", place, index)
        side = self._sides[number % SIDES]
        aspect = self._aspects[bisect(self._bounds, (number >> 16) % self._bounds[-1])]
        longer, shorter = round(side * aspect), round(side / aspect)
        return (longer, shorter) if number >> 63 else (shorter, longer)
