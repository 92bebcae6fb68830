"""Whether a series of samples goes up: the Theil-Sen estimator, which no outlier and no single step can sway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.99  #: that the slope is within its interval, if the samples were independent


class Trend(NamedTuple):
    """Of a series over time."""

    slope: float  #: units a second, the median over all pairs of samples
    low: float  #: the lower end of its confidence interval
    growth: float  #: the slope over the time that was judged
    goes_up: bool  #: `low` is above 0, and `growth` is more than matters


def trend(at_s: Sequence[float], values: Sequence[float], matters: float) -> Trend:
    """matters: the growth, over all of the time, up to which nobody cares; samples of a series that is flat but for its
    noise are not independent, so the interval alone would accuse too many. Fewer than three samples have no trend.

    Source: Sen 1968; `scipy.stats.theilslopes`.
    """
    if len(at_s) < 3:
        return Trend(0.0, 0.0, 0.0, False)
    from scipy.stats import theilslopes

    slope, _, low, _ = theilslopes(values, at_s, alpha=CONFIDENCE)
    growth = float(slope) * (at_s[-1] - at_s[0])
    return Trend(float(slope), float(low), growth, bool(low > 0 and growth > matters))
