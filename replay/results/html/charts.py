"""Plots as SVG elements of a page. Their colours are the page's variables, so they follow its light and dark.

matplotlib draws them. It is imported here and nowhere else, since a machine that only serves does not need it.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorferry.codecs.errors import ReportError
from tensorferry.pipeline.telemetry.timeline import SPANS
from tensorferry.replay.results.time_series import UNSENT, Bins, Floats, Span, distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Placeholder colours, which occur nowhere else. Each becomes a variable of the page's style sheet.
INK, MUTED, GRID, PAPER = "#010203", "#010204", "#010205", "#010206"
COLOURS = tuple(f"#0102{number:02x}" for number in range(0x10, 0x1C))
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    colour: f"c{number}" for number, colour in enumerate(COLOURS)
}
BAD = COLOURS[5]  #: failures and fallbacks
#: The colour of each part of a request's path. They differ from each other and from `BAD`.
_PARTS = {
    name: COLOURS[number]
    for name, number in zip((*SPANS.values(), UNSENT), (10, 9, 1, 11, 0, 2, 3, 6, 4, 7, 8), strict=True)
}
#: In inches of 72 points. A plot is so narrow that it can be read on a telephone, where it is as wide as the screen.
WIDTH, HEIGHT = 5.0, 3.0

#: A legend's measures in points: its width, the handle beside each name, and a character of 9 points.
_LEGEND_PT, _HANDLE_PT, _CHARACTER_PT = 320.0, 30.0, 4.6

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched and copied, and takes the page's font
    "font.size": 10.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "lines.linewidth": 1.7,
}

#: Styles of lines that may overlap, so that a covered line shows through the gaps of the upper one.
_DASHES: tuple[Any, ...] = ("-", (0, (3, 1.5)), (0, (1, 1)))

Draw = Callable[["Axes"], None]


def installed() -> bool:
    """Return whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def svg(name: str, draw: Draw, *, height: float = HEIGHT) -> str:
    """Draw a plot as an `<svg>` element. Equal numbers give equal bytes.

    name: unique in its page, since the ids inside are made from it. height: in inches; all plots have one width.
    Raises ReportError without matplotlib.
    """
    if not installed():
        raise ReportError(name, "plots need matplotlib: pip install 'tensorferry[report]'")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no links, no date
        figure.savefig(written, format="svg", metadata=nothing, transparent=True)
    return _in_page(written.getvalue(), name)


def _in_page(document: str, name: str) -> str:
    """Cut out the element, as wide as its place, and give it the page's colours and ids."""
    element = document[document.index("<svg") :].strip()
    element = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', element, count=1)
    element = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>", "", element, count=1, flags=re.DOTALL
    )  # of the page: style.css
    element = re.sub(r"#0102[0-9a-f]{2}", lambda match: f"var(--{_VARIABLES[match[0]]})", element)
    element = re.sub(r'\bid="', f'id="{name}-', element)
    element = re.sub(r'((?:xlink:)?href="#|url\(#)', lambda match: f"{match[1]}{name}-", element)
    return element.replace("xlink:href", "href")


# --- kinds of plots -----------------------------------------------------------------------------------------------


def distributions(values_s: Mapping[str, Floats], marked: Sequence[float] = (0.5, 0.9, 0.99)) -> Draw:
    """Draw the share of requests that took at most each time, in seconds on a logarithmic axis."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import LogLocator

        for colour, dashes, (name, values) in zip(cycle(COLOURS), cycle(_DASHES), values_s.items(), strict=False):
            if len(values):
                at_s, share = distribution(values)
                at_s = np.maximum(at_s, 1e-6)
                axes.step(at_s, share * 100, where="post", color=colour, linestyle=dashes, label=name)
        for wanted in marked:
            axes.axhline(wanted * 100, color=MUTED, linewidth=0.7, linestyle=(0, (2, 3)))
        axes.set_xscale("log")
        low_s, high_s = axes.get_xlim()
        if high_s < 100 * low_s:  # the default ticks would put at most one number on it
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: duration_text(value))
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_ylim(0, 101)
        axes.set_ylabel("% of requests")
        _legend(axes, len(values_s))

    return draw


def lines(
    at_s: Floats, values: Mapping[str, Floats], unit: str, *, seconds: bool = False, stepped: bool = False
) -> Draw:
    """Draw values over the time of the run. seconds: they are durations. stepped: one value for each bin."""

    def draw(axes: Axes) -> None:
        for colour, dashes, (name, line) in zip(cycle(COLOURS), cycle(_DASHES), values.items(), strict=False):
            if stepped:
                axes.stairs(line, at_s, baseline=None, color=colour, linestyle=dashes, label=name, linewidth=1.7)
            else:
                axes.plot(at_s, line, color=colour, linestyle=dashes, label=name)
        axes.set_ylim(bottom=0)
        _time_axis(axes, float(at_s[-1]) if len(at_s) else 1.0)
        if seconds:
            axes.yaxis.set_major_formatter(lambda value, _: duration_text(value))
        axes.set_ylabel(unit)
        _legend(axes, len(values))

    return draw


def traces(values: Mapping[str, tuple[Floats, Floats]], unit: str, end_s: float, limit: float | None = None) -> Draw:
    """Draw values over the time of the run, each with times of its own. limit: a line for their upper limit."""

    def draw(axes: Axes) -> None:
        for colour, (name, (at_s, line)) in zip(cycle(COLOURS), values.items(), strict=False):
            axes.step(at_s, line, where="post", color=colour, label=name)
        if limit is not None:
            axes.axhline(limit, color=BAD, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.set_ylim(bottom=0)
        _time_axis(axes, end_s)
        axes.set_ylabel(unit)
        _legend(axes, len(values))

    return draw


def layers(at_s: Floats, values: Mapping[str, Floats], unit: str) -> Draw:
    """Draw values over the time of the run, stacked."""

    def draw(axes: Axes) -> None:
        colours = [_of_part(name) for name in values]
        axes.stackplot(at_s, *values.values(), labels=list(values), colors=colours, linewidth=0)
        axes.set_ylim(bottom=0)
        _time_axis(axes, float(at_s[-1]) if len(at_s) else 1.0)
        axes.set_ylabel(unit)
        _legend(axes, len(values), columns=3)

    return draw


def columns(bins: Bins, values: Mapping[str, Floats], unit: str) -> Draw:
    """Draw the counts of each bin, stacked. The last value has the colour `BAD`."""

    def draw(axes: Axes) -> None:
        below = np.zeros(bins.count)
        for number, (name, counts) in enumerate(values.items()):
            colour = BAD if number == len(values) - 1 else COLOURS[number]
            axes.bar(bins.edges_s[:-1], counts, bins.width_s, below, align="edge", color=colour, label=name)
            below = below + counts
        _time_axis(axes, float(bins.edges_s[-1]))
        axes.set_ylabel(f"{unit} per {duration_text(bins.width_s)}")
        _legend(axes, len(values))

    return draw


def bars(values_s: Mapping[str, tuple[float, float]], names: tuple[str, str]) -> Draw:
    """Draw two durations for each name, the second one the longer, from top to bottom."""

    def draw(axes: Axes) -> None:
        places = np.arange(len(values_s))
        shorter, longer = zip(*values_s.values(), strict=True)
        axes.barh(places, shorter, 0.62, color=COLOURS[0], label=names[0], zorder=2.1)  # in front of the others
        axes.barh(places, longer, 0.62, color=MUTED, alpha=0.35, label=names[1])
        _name_axis(axes, values_s)
        _legend(axes, 2)

    return draw


def timelines(rows: Mapping[str, Sequence[Span]]) -> Draw:
    """Draw the paths of several requests, each from its own start, from top to bottom."""

    def draw(axes: Axes) -> None:
        longest_s = max((spans[-1].end_ms - spans[0].start_ms for spans in rows.values()), default=1.0) / 1e3
        shown: set[str] = set()
        for place, spans in enumerate(rows.values()):
            for span in spans:
                length_s = (span.end_ms - span.start_ms) / 1e3
                if length_s < longest_s / 500:  # narrower than a line
                    continue
                colour = _of_part(span.name)
                label = None if span.name in shown else span.name
                shown.add(span.name)
                axes.barh(
                    place, length_s, 0.7, left=(span.start_ms - spans[0].start_ms) / 1e3, color=colour, label=label
                )
        _name_axis(axes, rows)
        _legend(axes, len(shown), columns=3)

    return draw


def intervals(values: Mapping[str, tuple[float, float, float]], unit: str, *, seconds: bool = False) -> Draw:
    """Draw an estimate with its interval (low, estimate, high) for each name, from top to bottom."""

    def draw(axes: Axes) -> None:
        for place, (low, middle, high) in enumerate(values.values()):
            axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=3.5, solid_capstyle="round", alpha=0.45)
            axes.plot([middle], [place], "o", color=COLOURS[0], markersize=6)
        _name_axis(axes, list(map(_folded, values)), seconds=seconds)
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel(unit)

    return draw


def curve(
    x: Sequence[float], y: Sequence[float], x_unit: str, y_unit: str, marked: Mapping[str, float] = MappingProxyType({})
) -> Draw:
    """Draw y over x, which has a logarithmic axis. marked: x values to mark, by name."""

    def draw(axes: Axes) -> None:
        axes.plot(x, y, "o-", color=COLOURS[0], markersize=3.5)
        for colour, (name, at) in zip(COLOURS[1:], marked.items(), strict=False):
            axes.axvline(at, color=colour, linestyle=(0, (4, 2)), label=f"{name}: {at:g} {x_unit}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_unit)
        axes.set_ylabel(y_unit)
        _legend(axes, 1 + len(marked))

    return draw


def duration_text(value_s: float) -> str:
    """Write a duration briefly: 20 ms, 1.5 s, 10 min."""
    if value_s == 0:
        return "0"
    for least, unit, name in ((3600, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms")):
        if abs(value_s) >= least:
            return f"{value_s / unit:.3g} {name}"
    return f"{value_s / 1e-6:.3g} µs"


def _of_part(name: str) -> str:
    """Return the colour of a part of a request's path, which is the same in all plots."""
    return _PARTS.get(name, BAD)


def _folded(name: str) -> str:
    """Wrap a name to at most three lines, none so long that it takes the plot's room."""
    return "\n".join(textwrap.wrap(name, 30, max_lines=3, placeholder=" \u2026")) or name


def _name_axis(axes: Axes, names: Iterable[str], *, seconds: bool = True) -> None:
    """Write a name beside each row, from top to bottom. seconds: the other axis has durations."""
    rows = list(names)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    if seconds:
        axes.xaxis.set_major_formatter(lambda value, _: duration_text(value))


def _time_axis(axes: Axes, end_s: float) -> None:
    axes.set_xlim(0, max(end_s, 1e-3))
    axes.xaxis.set_major_formatter(lambda value, _: duration_text(value))


def _legend(axes: Axes, count: int, *, columns: int = 4) -> None:
    """Draw a legend above the plot, where it hides nothing. A single value has none, since the caption names it."""
    handles, labels = axes.get_legend_handles_labels()
    if count > 1 and labels:
        names = list(map(_folded, labels))
        a_name = _HANDLE_PT + _CHARACTER_PT * max(len(line) for name in names for line in name.splitlines())
        columns = max(1, min(columns, count, int(_LEGEND_PT / a_name)))  # more would be cut at the right
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(handles, names, ncols=columns, handlelength=1.2, **place)
