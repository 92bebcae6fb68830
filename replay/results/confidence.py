"""Confidence intervals over several runs: Student's t interval over the runs' own values.

Requests of one run wait for each other, so they predict little of another run. Only the differences between runs count,
and a single run shows none.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from statistics import fmean, variance

import msgspec

#: Two-sided 95 % of Student's t, by degrees of freedom; between two of them the lower one's, which is the wider.
#: Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2. The tests compare each with scipy.
_T_95 = {
    1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622, 10: 2.2281,
    11: 2.2010, 12: 2.1788, 13: 2.1604, 14: 2.1448, 15: 2.1314, 16: 2.1199, 17: 2.1098, 18: 2.1009, 19: 2.0930,
    20: 2.0860, 25: 2.0595, 30: 2.0423, 40: 2.0211, 60: 2.0003, 120: 1.9799,
}  # fmt: skip


class Estimate(msgspec.Struct, frozen=True):
    """A number with its 95 % confidence interval; it has no bounds if nothing determines them."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is above or below 0; else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


class Repeats(msgspec.Struct, frozen=True):
    """The values of a number in several runs, all from 0 to `most`. values: at least one."""

    values: tuple[float, ...]
    most: float = math.inf

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def estimate(self) -> Estimate:
        """The mean with its interval."""
        if len(self.values) < 2:
            return Estimate(self.mean)
        half = t_95(len(self.values) - 1) * math.sqrt(self._mean_variance)
        return Estimate(self.mean, max(0.0, self.mean - half), min(self.most, self.mean + half))

    def relative_to(self, base: Repeats) -> Estimate | None:
        """Return the relative change of the mean from that of independent other runs; None if theirs is 0.

        The interval has the first-order error of a ratio (delta method) and the degrees of freedom of Welch's test.
        Source: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
        involved" (1947).
        """
        if not base.mean:
            return None
        ratio = self.mean / base.mean
        if min(len(self.values), len(base.values)) < 2:
            return Estimate(ratio - 1)
        parts = [(self._mean_variance, len(self.values)), (ratio**2 * base._mean_variance, len(base.values))]
        whole = sum(part for part, _ in parts)
        if not whole:
            return Estimate(ratio - 1, ratio - 1, ratio - 1)
        freedom = 1 / sum((part / whole) ** 2 / (count - 1) for part, count in parts)
        half = t_95(freedom) * math.sqrt(whole) / base.mean
        return Estimate(ratio - 1, max(-1.0, ratio - 1 - half), ratio - 1 + half)

    @property
    def _mean_variance(self) -> float:
        return variance(self.values) / len(self.values)


def t_95(freedom: float) -> float:
    """Return how many standard errors a 95 % interval reaches to each side. freedom: degrees of freedom, at least 1.

    The value comes from a table, since scipy would be a large dependency for this alone.
    """
    known = list(_T_95)
    return _T_95[known[max(0, bisect_right(known, freedom + 1e-9) - 1)]]
