"""How sure a number of several runs is: bootstrap intervals over repeats.

Two levels: runs are drawn with replacement, and then requests within each, so an interval has both how runs differ and
how requests do. Requests of one run that wait for each other are less independent than this takes them to be, so with a
single run, whose interval knows nothing of other runs, it is too narrow.

Source: Davison and Hinkley, "Bootstrap Methods and their Application" (1997), 2.4 and 3.8; the spread between n runs is
widened by sqrt(n / (n - 1)), as a bootstrap of few draws is that much too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tensorferry.replay.results.time_series import Floats

DRAWS = 2000
COVERED = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A number and between what it lies with 95 % confidence; without bounds where nothing says so."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """1 or -1 where it is surely above or below 0; else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


class Resampled(msgspec.Struct, frozen=True):
    """A number, and the values that it would have had in other runs; none where that is unknown."""

    value: float
    draws: Floats

    @property
    def estimate(self) -> Estimate:
        return _estimate(self.value, self.draws)

    def relative_to(self, base: Resampled) -> Estimate | None:
        """By which part it is more than another one, measured apart from it; None: than nothing."""
        if not base.value:
            return None
        count = min(len(self.draws), len(base.draws))
        below = base.draws[:count]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = self.draws[:count] / below - 1
        return _estimate(self.value / base.value - 1, ratios[np.isfinite(ratios)])


def quantile(runs: Sequence[Floats], share: float, seed: int = 0, count: int = DRAWS) -> Resampled:
    """Of all the requests of several runs: nearest rank. runs: a value of each request; at least one in all.

    The k-th smallest of n values drawn with replacement is the value at the k-th smallest of n uniform places, which is
    Beta(k, n - k + 1): so a draw costs one random number, and not n.
    """
    random = np.random.default_rng(seed)
    present = [np.sort(run) for run in runs if len(run)]
    value = _at(np.sort(np.concatenate(present)), share)
    chosen = np.sort(random.integers(len(present), size=(count, len(present))), axis=1)
    draws = np.empty(count)
    kinds, which = np.unique(chosen, axis=0, return_inverse=True)
    for number, kind in enumerate(kinds):
        pooled = np.sort(np.concatenate([present[place] for place in kind]))
        wanted = np.flatnonzero(which.ravel() == number)
        size, rank = len(pooled), _rank(len(pooled), share)
        places = (random.beta(rank, size - rank + 1, len(wanted)) * size).astype(np.intp)
        draws[wanted] = pooled[np.minimum(places, size - 1)]
    return Resampled(value, _widened(value, draws, len(present)))


def mean(runs: Sequence[float], seed: int = 0, count: int = DRAWS) -> Resampled:
    """Of a number of each run. A single one has no draws: it says nothing of other runs."""
    values = np.array(runs, np.float64)
    value = float(values.mean())
    if len(values) == 1:
        return Resampled(value, np.empty(0))
    chosen = np.random.default_rng(seed).integers(len(values), size=(count, len(values)))
    return Resampled(value, _widened(value, values[chosen].mean(axis=1), len(values)))


def share(hits: Sequence[int], of: Sequence[int], seed: int = 0, count: int = DRAWS) -> Resampled:
    """Hits among all of several runs. of: at least one in all."""
    hit, whole = np.array(hits, np.float64), np.array(of, np.float64)
    value = float(hit.sum() / whole.sum())
    if len(hit) == 1:
        return Resampled(value, np.empty(0))
    chosen = np.random.default_rng(seed).integers(len(hit), size=(count, len(hit)))
    with np.errstate(invalid="ignore"):
        draws = hit[chosen].sum(axis=1) / whole[chosen].sum(axis=1)
    return Resampled(value, _widened(value, draws[np.isfinite(draws)], len(hit)))


def _estimate(value: float, draws: Floats) -> Estimate:
    if not len(draws):
        return Estimate(value)
    low, high = np.quantile(draws, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return Estimate(value, float(min(low, value)), float(max(high, value)))


def _widened(value: float, draws: Floats, runs: int) -> Floats:
    if runs == 1:
        return draws
    widened: Floats = np.maximum(value + (draws - value) * np.sqrt(runs / (runs - 1)), 0.0)
    return widened


def _rank(size: int, share: float) -> int:
    return max(1, int(np.ceil(share * size - 1e-9)))


def _at(ordered: Floats, share: float) -> float:
    return float(ordered[_rank(len(ordered), share) - 1])
