"""The pages of a run are made from its files alone, are one file each, and run nothing that a trace contains."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from tensorferry.cli.main import main
from tensorferry.codecs.errors import ReportError
from tensorferry.codecs.messages import Gauge, Member
from tensorferry.pipeline.telemetry.timeline import SPANS
from tensorferry.replay.results import time_series
from tensorferry.replay.results.html import charts, page
from tensorferry.replay.results.html.run import report
from tensorferry.replay.results.perfetto import MOST_REQUESTS, SLOWEST, perfetto
from tensorferry.replay.results.result_folder import Run, read_run
from tensorferry.replay.results.summary import Summary
from tensorferry.replay.run.gauge_samples import Sampler

pytestmark = pytest.mark.usefixtures("plots")

MakeRun = Callable[..., Path]
DOCS = Path(__file__).parents[3] / "docs"


class Reader(HTMLParser):
    """Every tag must be closed, every id be there once, and every reference lead somewhere."""

    VOID = frozenset({"meta", "path", "use", "rect", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")
            self.links += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: bytes) -> Reader:
    reader = Reader(html.decode())
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)
    return reader


def test_results_that_are_not_all_there_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    results = make_run(tmp_path) / "results.jsonl"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ReportError, match=r"results\.jsonl: it has 2 requests, .* says 3 were sent"):
        read_run(tmp_path)


@pytest.mark.slow
def test_a_report_is_one_file_that_loads_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    html = report(read_run(make_run(tmp_path, range(10, 60), inline=(3, 4))))
    reader = read(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not re.search(rb"@import|https?://(?!www\.w3\.org/)", html)
    assert reader.tags.count("svg") == 8


@pytest.mark.slow
def test_a_report_follows_light_and_dark(make_run: MakeRun, tmp_path: Path) -> None:
    """Each colour of a plot is a variable, which the style sheet has twice."""
    html = report(read_run(make_run(tmp_path))).decode()
    style, body = html.split("</style>")
    assert "prefers-color-scheme: dark" in style
    assert not re.findall(r"#[0-9a-f]{6}\b", body)
    for name in set(re.findall(r"var\(--(\w+)\)", body)):
        assert len(re.findall(rf"--{name}:", style)) == 2, name


def test_a_report_says_what_was_done_and_what_came_of_it(make_run: MakeRun, tmp_path: Path) -> None:
    said = read(report(read_run(make_run(tmp_path, [10] * 39 + [900], inline=(1,), failed=(7,))))).text
    for part in ("ab" * 32, "cd" * 32, "39", "ok of 40 sent", "line 40", "busy", "line 8: full", "name: local"):
        assert part in said, part


@pytest.mark.slow
@pytest.mark.parametrize(("count", "few"), [(25, True), (100, False)])
def test_a_report_says_where_a_p99_is_a_maximum(make_run: MakeRun, tmp_path: Path, count: int, few: bool) -> None:
    said = read(report(read_run(make_run(tmp_path, range(count))))).text
    for part in (f"p99 of {count} latencies is their maximum", "latency p99, the maximum", "steps: p99 of fewer"):
        assert (part in said) is few, part
    steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert {tuple(step["since_sent"]["maxima"]) for step in steps} == {("p99",) if few else ()}


def test_no_two_parts_of_a_way_look_alike() -> None:
    """In light and in dark, all colours, failures included, differ by at least 40 in one of red, green and blue."""
    at_s = np.array([0.0, 1.0])
    parts = [
        colour
        for name in (*SPANS.values(), time_series.UNSENT, time_series.FAILED)
        for colour in set(re.findall(r"var\(--(c\d+)\)", charts.svg("part", charts.layers(at_s, {name: at_s}, ""))))
    ]
    assert len(parts) == len(SPANS) + 2
    assert len(set(parts)) == len(parts)
    style = files("tensorferry.replay.results.html").joinpath("style.css").read_text(encoding="utf-8")
    named = re.findall(r"--(c\d+): #(\w\w)(\w\w)(\w\w)", style)
    light, dark = named[: len(named) // 2], named[len(named) // 2 :]
    for theme in (light, dark):
        rgb = {name: [int(part, 16) for part in parts] for name, *parts in theme}
        for one, other in combinations((rgb[colour] for colour in parts), 2):
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) >= 40, (one, other)


def test_every_cell_of_a_table_names_its_column_where_there_is_no_room_for_columns() -> None:
    head, row = ("step", "p50", "p99 of <all>", "max", "runs", ""), ("a", 1, page.Marked("2", "worse"), 3, 4, 5)
    html = with_table(page.Table(head, [row]))
    assert 'class="wide"' in html
    assert re.findall(r'<td[^>]* data-head="([^"]*)"', html) == ["p50", "p99 of &lt;all&gt;", "max", "runs"]
    assert '<td class="worse" data-head="p99 of &lt;all&gt;">2</td>' in html
    assert 'class="wide"' not in with_table(page.Table(head[:5], [row[:5]]))
    assert "content: attr(data-head)" in html


def with_table(table: page.Table) -> str:
    return page.document("plan.html", "", "", figures=[], budgets=table).decode()


def test_all_text_of_a_page_is_escaped() -> None:
    """Wherever a template shows it: title, lead, alarm, caption, head, cell and mark; only a plot is markup."""
    bad = "<b onclick='x'>\""
    table = page.Table((bad,) * 6, [(page.Marked(bad, "worse"), *(bad,) * 5)], caption=bad)
    html = page.document("plan.html", bad, bad, [bad], figures=[page.Figure(bad, bad, "<svg></svg>")], budgets=table)
    assert html.count(b"&lt;b onclick=&#39;x&#39;&gt;&#34;") == 2 + 1 + 1 + 2 + 1 + 6 + 6 + 5
    assert b"<b onclick" not in html
    assert b"<svg></svg>" in html


def test_an_axis_of_durations_within_one_decade_has_numbers() -> None:
    element = charts.svg("latency", charts.distributions({"a": np.array([0.02, 0.03, 0.057])}))
    assert {"20 ms", "50 ms"} <= set(re.findall(r"\d+ ms", element))


@pytest.mark.parametrize(
    "names", [[f"tokenizer-{rank}" for rank in range(5)], ["pool.budget_mb=256 transport=shm"] * 2]
)
def test_the_names_in_a_plot_are_not_cut(names: list[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(charts.WIDTH, charts.HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    at_s = np.array([0.0, 1.0])
    charts.traces({f"{name}{n}": (at_s, at_s) for n, name in enumerate(names)}, "%", 1.0)(axes)
    figure.draw_without_rendering()
    assert axes.get_legend().get_window_extent().x1 <= figure.bbox.x1


def test_names_of_any_length_leave_room_for_the_plot() -> None:
    names = [f"{transport} " + "tokenizer.options.max_pixels=1000000 " * 8 for transport in ("shm", "cpu")]
    values = {name: (0.1, 0.2, 0.3) for name in names}
    element = charts.svg("p99", charts.intervals(values, ""))  # a warning of matplotlib's fails here
    assert {"shm", "cpu"} <= set(re.findall(r"shm|cpu", element))
    assert "\u2026" in element


@pytest.mark.slow
def test_what_a_trace_says_is_text_and_not_markup(make_run: MakeRun, tmp_path: Path) -> None:
    config = {"name": "<script>alert(1)</script>"}
    reader = read(report(read_run(make_run(tmp_path, config=config))))
    assert "script" not in reader.tags
    assert "<script>alert(1)</script>" in reader.text


@pytest.mark.slow
def test_the_same_run_makes_the_same_page(make_run: MakeRun, tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path))
    assert report(run) == report(run)


@pytest.mark.slow
@pytest.mark.parametrize("failed", [(), (0, 1, 2)])
def test_a_run_of_failures_or_of_nothing_has_a_page(make_run: MakeRun, tmp_path: Path, failed: tuple[int, ...]) -> None:
    run = read_run(make_run(tmp_path, [10] * len(failed), failed=failed))
    assert "ok of" in read(report(run)).text


@pytest.mark.slow
def test_an_unscheduled_run_has_no_intended_times(make_run: MakeRun, tmp_path: Path) -> None:
    said = read(report(read_run(make_run(tmp_path, speed="max")))).text
    assert "from the send" in said
    assert "intended" not in said


# --- numbers over time ------------------------------------------------------------------------------------------


def test_bins_are_of_widths_that_people_count_in() -> None:
    assert (time_series.Bins.of(9).width_s, time_series.Bins.of(60).width_s, time_series.Bins.of(3600).width_s) == (
        0.1,
        1,
        60,
    )
    for duration_s in (0.001, 1, 59.9, 86_400 * 30):
        bins = time_series.Bins.of(duration_s)
        assert 1 <= bins.count <= time_series.MOST_BINS
        assert bins.edges_s[-1] >= duration_s
        assert bins.counts(np.array([duration_s])).sum() == 1


def test_the_parts_of_a_way_follow_each_other(make_run: MakeRun, tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [100]))
    spans = time_series.spans(run, run.rows[0])
    assert [span.name for span in spans] == [
        "to the tokenizer",
        "planning",
        "processing",
        "hand-over",
        "encoder queue",
        "encoding",
        "to the scheduler",
        "answer",
    ]
    assert [span.end_ms for span in spans] == pytest.approx([5, 10, 20, 20, 50, 90, 95, 100])
    assert all(one.end_ms == following.start_ms for one, following in pairwise(spans))


def test_everybody_in_flight_is_somewhere(make_run: MakeRun, tmp_path: Path) -> None:
    """Three requests 50 ms apart that take 120 ms each: one, two, three, two, one of them are there."""
    run = read_run(make_run(tmp_path, [120, 120, 120]))
    at_s = np.array([0.025, 0.075, 0.11, 0.13, 0.2, 0.23])
    where = time_series.whereabouts(run, at_s)
    assert sum(where.values()).tolist() == [1, 2, 3, 2, 1, 0]  # type: ignore[union-attr]
    assert where["encoder queue"].tolist() == [1, 1, 0, 1, 0, 0]


def test_fallbacks_are_counted_when_they_happened(make_run: MakeRun, tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [10] * 40, inline=(20, 21)))
    bins = time_series.Bins.of(2.0, most=2)
    pooled, fell_back = time_series.fallbacks(run, bins)
    assert (pooled.tolist(), fell_back.tolist()) == ([20, 18], [0, 2])


def test_quantiles_over_time_are_values_that_occurred() -> None:
    bins = time_series.Bins(1.0, np.array([0.0, 1.0, 2.0, 3.0]))
    p50, p99 = time_series.quantiles_over_time(
        bins, np.array([0.1, 0.2, 0.3, 2.5]), np.array([3.0, 1, 2, 9]), (0.5, 0.99)
    )
    assert (p50[[0, 2]].tolist(), p99[[0, 2]].tolist()) == ([2, 9], [3, 9])
    assert np.isnan(p50[1])


# --- gauges -----------------------------------------------------------------------------------------------------


def member(lent: float) -> Member:
    return Member("tokenizer", 0, 1, "ready", (Gauge("pool_lent_nbytes", lent), Gauge("other", 1.0)))


def test_samples_are_thinned_rather_than_kept_without_end() -> None:
    sampler = Sampler(every_s=1, most=8)
    for second in range(100):
        sampler.take([member(second)], second * 10**9)
    samples = sampler.samples
    assert len(samples) <= 8
    assert samples[0].at_ms == 0
    assert all(sample.gauges == {"pool_lent_nbytes": sample.at_ms / 1e3} for sample in samples)


async def test_a_deployment_that_gives_no_numbers_is_asked_again() -> None:
    answers = [TimeoutError(), [member(7)], asyncio.CancelledError()]

    class Client:
        async def refresh(self, timeout_s: float = 5.0) -> list[Member]:
            answer = answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            assert isinstance(answer, list)
            return answer

    sampler = Sampler(every_s=0)
    with pytest.raises(asyncio.CancelledError):
        await sampler.run(Client(), 0)
    assert [sample.gauges for sample in sampler.samples] == [{"pool_lent_nbytes": 7}]


# --- Perfetto ---------------------------------------------------------------------------------------------------


def events(run: Run) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(b"".join(perfetto(run)))["traceEvents"]
    return found


def test_slices_of_a_lane_nest_or_follow_each_other(make_run: MakeRun, tmp_path: Path) -> None:
    """A viewer needs this of the slices of one thread."""
    run = read_run(make_run(tmp_path, [10, 300, 20, 90, 70, 400, 5, 60]))
    slices = [event for event in events(run) if event["ph"] == "X"]
    lanes = {event["tid"] for event in slices}
    assert len(lanes) == 3
    for lane in lanes:
        wholes = [e for e in slices if e["tid"] == lane and str(e["name"]).startswith("line")]
        ends = 0.0
        for whole in wholes:
            start, end = float(str(whole["ts"])), float(str(whole["ts"])) + float(str(whole["dur"]))
            assert start >= ends - 1e-6
            ends = end
    assert [e["args"] for e in events(run) if e["ph"] == "C" and "lent" in str(e["name"])] == [{"value": 5e5}] * 2


def test_of_many_requests_some_are_in_it_and_the_slowest_always(make_run: MakeRun, tmp_path: Path) -> None:
    count = 3 * MOST_REQUESTS
    run = read_run(make_run(tmp_path, [1000 if n % 60 == 7 else 10 for n in range(count)]))
    named = [str(event["name"]) for event in events(run) if str(event["name"]).startswith("line")]
    assert MOST_REQUESTS - SLOWEST <= len(named) <= MOST_REQUESTS
    assert {f"line {n + 1}" for n in range(count) if n % 60 == 7} <= set(named)


# --- files and the command ----------------------------------------------------------------------------------------


def test_the_schema_of_the_summary_is_documented() -> None:
    """docs/summary.schema.json is `msgspec`'s schema of the classes. If this fails, write it again."""
    schema = msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Summary)), indent=2) + b"\n"
    assert (DOCS / "summary.schema.json").read_bytes() == schema


@pytest.mark.slow
def test_the_pages_are_made_again_from_the_folder(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gauges.jsonl",
        "perfetto.json",
        "report.html",
        "results.jsonl",
        "summary.json",
    ]


def test_without_matplotlib_the_rest_is_written_and_said(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "pip install 'tensorferry[report]'" in result.stdout
    assert (tmp_path / "perfetto.json").exists()
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(ReportError, match="matplotlib"):
        page.plot("x", "", "", charts.lines(np.array([0.0, 1.0]), {}, ""))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("summary.json", None, "--out"),
        ("summary.json", "{}", "missing required field"),
        ("results.jsonl", '{"line": 1, "status": "ok"}\n{"line": "x"}\n', "results.jsonl:2"),
        ("gauges.jsonl", None, "--out"),
    ],
)
def test_a_folder_that_no_replay_has_written_is_refused_by_name(
    make_run: MakeRun, tmp_path: Path, file: str, content: str | None, said: str
) -> None:
    make_run(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert file in result.stderr
    assert said in result.stderr
