"""What a benchmark found, as Markdown that reads well on a terminal too."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import Measurement, Outcome, Verdict

#: Details worth a column, where any of a benchmark's measurements has them: (name, heading).
_DETAILS = (
    ("nbytes", "bytes"),
    ("held_ms", "loop held, ms"),
    ("producer_faults", "faults, producer"),
    ("consumer_faults", "faults, consumer"),
    ("cpu_s_per_gib", "CPU s/GiB"),
    ("p99_ms", "p99, ms"),
    ("max_ms", "max, ms"),
    ("last_ms", "the last, ms"),
    ("times", "times off"),
    ("times_low", "from"),
    ("times_high", "to"),
    ("more_ms", "ms more"),
    ("more_high_ms", "at most"),
    ("wrong", "wrong"),
    ("tflops", "TFLOP/s"),
    ("matmul_percent", "% of matmul"),
    ("host_waits", "host waits"),
    ("max_difference", "max difference"),
    ("rms_difference", "rms difference"),
)


def table(outcome: Outcome) -> str:
    """A heading, the measurements and the floors."""
    details = [detail for detail in _DETAILS if any(detail[0] in one.details for one in outcome.measurements)]
    unit = outcome.measurements[0].unit
    heading = ["", f"p50, {unit}", "p10", "p90", *(heading for _, heading in details)]
    rows = [_row(one, [name for name, _ in details]) for one in outcome.measurements]
    parts = [f"### {outcome.title}", "", _markdown(heading, rows), ""]
    if outcome.verdicts:
        verdicts = [_verdict(one) for one in outcome.verdicts]
        parts += [_markdown(["floor", "measured", "limit", "met"], verdicts), ""]
    return "\n".join(parts)


def _row(one: Measurement, details: Sequence[str]) -> list[str]:
    numbers = [one.p50, one.p10, one.p90, *(one.details.get(name) for name in details)]
    return [one.contender, *(_number(number) for number in numbers)]


def _verdict(one: Verdict) -> list[str]:
    return [one.floor, _number(one.measured), f"{one.sense} {_number(one.limit)}", "yes" if one.met else "NO"]


def _number(value: float | None) -> str:
    """Three digits, as the noise allows no more."""
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = [heading, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )
