"""The comparison of several runs: repeats are one group, and each group is better or worse than the first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensorferry.codecs.errors import ReportError
from tensorferry.replay.results import time_series
from tensorferry.replay.results.confidence import Estimate, Repeats
from tensorferry.replay.results.result_folder import Run, read_run
from tensorferry.replay.results.time_series import Floats

#: Settings that say where a deployment is, but not how it behaves.
_PLACES = ("name", "runtime_dir")
#: Options of a replay that, like the deployment's settings, keep runs from being repeats.
_OPTIONS = ("speed", "concurrency", "limit", "sessions", "seed")
_DEPTH = 3  #: how many levels of folders are searched for runs


class Metric(msgspec.Struct, frozen=True):
    """A number that each group has."""

    key: str
    name: str
    unit: str  #: s, 1/s, %
    more_is_better: bool = False


METRICS = (
    Metric("p50", "latency p50", "s"),
    Metric("p90", "latency p90", "s"),
    Metric("p99", "latency p99", "s"),
    Metric("ok_per_s", "ok a second", "1/s", more_is_better=True),
    Metric("fallbacks", "fallbacks", "%"),
    Metric("failed", "failed", "%"),
)


class Group(msgspec.Struct, frozen=True):
    """Repeats: runs of the same settings and options."""

    name: str  #: the settings in which the groups differ, such as `pool.budget_mb=256`
    runs: list[Run]

    @property
    def latencies_s(self) -> list[Floats]:
        return [time_series.latencies(run) for run in self.runs]


class Value(msgspec.Struct, frozen=True):
    """A metric of a group, the mean of its runs' values. Latencies are in seconds, shares from 0 to 1."""

    estimate: Estimate
    change: Estimate | None  #: from the first group, relative to its value; None for itself, or if that is 0
    verdict: str  #: better or worse; empty if the interval cannot tell


class Line(msgspec.Struct, frozen=True):
    """A group as one line of a table."""

    name: str
    folders: list[str]
    values: dict[str, Value]  #: the group's values by the key of the metric


class Comparison(msgspec.Struct, frozen=True):
    lines: list[Line]  #: all are compared with the first
    warnings: list[str]


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Read the runs in these folders and the folders in them, by name. Raises ReportError if a folder has none."""
    found: list[Run] = []
    for folder in folders:
        here = list(_folders_of_runs(folder, _DEPTH))
        if not here:
            raise ReportError(str(folder), "it has no run; name folders that `replay --out` or `sweep` wrote")
        found += map(read_run, here)
    return list({run.folder.resolve(): run for run in found}.values())


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group repeats, in the order of each group's first run."""
    settings = [_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    differing = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
    groups: dict[str, list[Run]] = {}
    for run, one in zip(runs, settings, strict=True):
        groups.setdefault(" ".join(f"{key}={_plain(one.get(key))}" for key in differing), []).append(run)
    return [Group(name or _folder_name(group), group) for name, group in groups.items()]


def compare(groups: Sequence[Group]) -> Comparison:
    """Compute every metric of every group, with its change from the first group."""
    base = _measured(groups[0].runs)
    lines = []
    for number, group in enumerate(groups):
        measured = _measured(group.runs)
        values = {}
        for metric in METRICS:
            if metric.key in measured:
                change = measured[metric.key].relative_to(base[metric.key]) if number and metric.key in base else None
                values[metric.key] = Value(measured[metric.key].estimate, change, _verdict(metric, change))
        lines.append(Line(group.name, [str(run.folder) for run in group.runs], values))
    return Comparison(lines, list(_warnings(groups)))


def _measured(runs: Sequence[Run]) -> dict[str, Repeats]:
    """Return each metric by its key, with the values of the runs that have it."""
    numbers = [_numbers(run) for run in runs]
    found: dict[str, Repeats] = {}
    for metric in METRICS:
        values = tuple(one[metric.key] for one in numbers if metric.key in one)
        if values:
            found[metric.key] = Repeats(values, 1.0 if metric.unit == "%" else math.inf)
    return found


def _numbers(run: Run) -> dict[str, float]:
    """Return the metrics that one run has, by their keys."""
    summary = run.summary
    numbers = {"ok_per_s": summary.per_second.ok or 0.0}
    latency = summary.latency_ms.from_intended if run.scheduled else summary.latency_ms.from_sent
    if latency is not None:
        numbers |= {"p50": latency.p50 / 1e3, "p90": latency.p90 / 1e3, "p99": latency.p99 / 1e3}
    pooled = [run.fell_back(item) for row in run.rows for item in row.items if run.pooled(item)]
    if pooled:
        numbers["fallbacks"] = sum(pooled) / len(pooled)
    if run.rows:
        numbers["failed"] = summary.requests.failed / len(run.rows)
    return numbers


def _verdict(metric: Metric, change: Estimate | None) -> str:
    if change is None or not change.sign:
        return ""
    return "better" if (change.sign > 0) == metric.more_is_better else "worse"


def _warnings(groups: Sequence[Group]) -> Iterator[str]:
    runs = [run for group in groups for run in group.runs]
    if len({run.summary.trace.sha256 for run in runs}) > 1:
        yield "the runs are of different traces"
    elif len({run.summary.run.payload_sha256 for run in runs}) > 1:
        yield "the runs did not send the same requests: their payloads differ"
    yield from _elsewhere(runs)
    for run in runs:
        s = run.summary.run
        what = [name for name, is_so in (("DEGRADED", s.degraded), ("interrupted", s.interrupted)) if is_so]
        what += [f"ended by {s.error}"] if s.error else []
        if what:
            yield f"{run.folder}: {', '.join(what)}"
    for group in groups:
        count = min((len(latencies) for latencies in group.latencies_s if len(latencies)), default=0)
        if 0 < count < 100:
            yield f"{group.name}: p99 of {count} latencies is their maximum, so its interval covers nothing above it"
    if any(len(group.runs) == 1 for group in groups):
        yield "one run does not show how runs differ, so it has no interval and no verdict; repeat it"


def _elsewhere(runs: Sequence[Run]) -> Iterator[str]:
    """Name the differences of machines, versions and ways of counting, which may make runs differ too."""
    facts = [dict(run.summary.machine.facts()) if run.summary.machine is not None else None for run in runs]
    versions = [run.summary.tensorferry for run in runs]
    for name in dict.fromkeys(name for one in facts if one is not None for name in one):
        yield from _differing(name, runs, [None if one is None else one.get(name, "none") for one in facts])
    yield from _differing("tensorferry", runs, versions)
    if None in facts:
        unknown = [run for run, one in zip(runs, facts, strict=True) if one is None]
        yield f"an earlier version did not record the machine of {_some(unknown)}"
    other = [run for run in runs if run.summary.per_second.window_s is None]
    if 0 < len(other) < len(runs):
        yield f"an earlier version counted the rates of {_some(other)} over another window"


def _differing(name: str, runs: Sequence[Run], values: Sequence[str | None]) -> Iterator[str]:
    """Say if runs have different values. values: one for each run; None: unknown."""
    having: dict[str, list[Run]] = {}
    for run, value in zip(runs, values, strict=True):
        if value is not None:
            having.setdefault(value, []).append(run)
    if len(having) > 1:
        said = "; ".join(f"{value} ({_some(those)})" for value, those in having.items())
        yield f"{name} differs: {said}"


def _some(runs: Sequence[Run]) -> str:
    """Return the folders of the runs, or the first three of many."""
    shown = ", ".join(str(run.folder) for run in runs[:3])
    return shown if len(runs) <= 3 else f"{shown} and {len(runs) - 3} more"


def _folders_of_runs(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "summary.json").is_file():
        yield folder
    elif depth:
        inside = folder.iterdir() if folder.is_dir() else ()
        for inner in sorted(path for path in inside if path.is_dir() and not path.name.startswith(".")):
            yield from _folders_of_runs(inner, depth - 1)


def _settings(run: Run) -> dict[str, Any]:
    """Return all settings and options that keep runs from being repeats, with flat keys such as `pool.budget_mb`."""
    s = run.summary.run
    flat = dict(_flat(s.config, ""))
    for key in _PLACES:
        flat.pop(key, None)
    return flat | {f"--{key}": getattr(s, key) for key in _OPTIONS}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _folder_name(runs: Sequence[Run]) -> str:
    return runs[0].folder.name or str(runs[0].folder)


def pooled_latencies(group: Group) -> Floats:
    """Return the latencies of all runs of a group together, in seconds."""
    return np.concatenate(group.latencies_s)
