"""The numbers of a run, computed from its outcomes. summary.json and the table have them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from tensorferry import __version__
from tensorferry.pipeline.recording.request import Drop
from tensorferry.pipeline.telemetry.timeline import READ, reached
from tensorferry.replay.results.machine import Machine
from tensorferry.replay.run.gauge_samples import PoolUse
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.run.sender import Outcome, Replay
from tensorferry.replay.trace.exact_numbers import NS
from tensorferry.replay.trace.loaded_trace import Trace
from tensorferry.replay.workload.prepare import Invented, Preparation

#: If the 99th percentile of lateness is above this, the load of a run was not the recorded one.
DEGRADED_LATENESS_MS = 500.0


#: The reason for requests that were not sent because the run had not started.
UNSENT = "not_started"


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds; nearest rank, so each is a value that occurred."""

    p50: float
    p90: float
    p99: float
    max: float
    count: int = 0  #: of how many values; 0: an earlier version did not record it
    maxima: list[str] = []  #: the percentiles that equal the maximum for want of values: `p99` below 100 values


class TraceSummary(msgspec.Struct, frozen=True):
    file: str
    sha256: str
    format: str
    origin: str  #: time of the first request on the trace's own clock
    span_s: float  #: recorded, from the first request to the last
    inversions: int
    notes: dict[str, int]
    outside: int  #: good rows outside --start and --end; not among those read
    glued: bool  #: whether it looks like several recordings, each with its own start
    drawn: bool  #: drawn from statistics, not recorded
    rate: float | None  #: requests a second that --rate gave to a trace without times


class RunSummary(msgspec.Struct, frozen=True):
    deployment: str
    transport: str
    speed: str
    seed: int
    concurrency: int | None
    limit: int | None
    sessions: str  #: how later turns are timed: clock, wait or think
    following: int  #: requests that depend on the one before
    guessed_think_times: int  #: how many of their think times include the recorded answer
    payload_sha256: str  #: of everything to be sent
    command: list[str]  #: as typed
    config: dict[str, Any]  #: every setting of the deployment, with the keys of its file
    pooled_from_nbytes: int | None  #: items of at least so many bytes should travel in a pool; None: none should
    strict: bool  #: whether a degraded run is a failed one
    duration_s: float  #: from the first due time to the last outcome
    interrupted: bool
    degraded: bool  #: sends were late; see DEGRADED_LATENESS_MS
    error: str  #: the error that ended the run early, or empty
    date: str = ""  #: when the command started, in UTC and ISO 8601; empty: an earlier version did not record it


class RequestCounts(msgspec.Struct, frozen=True):
    """read = sent + dropped; sent = ok + failed."""

    read: int
    sent: int
    ok: int
    failed: int
    dropped: int
    delayed: int  #: those sent that the limit of --concurrency held back
    waited: int  #: those sent later than recorded because they waited for the answer of the turn before


class Reason(msgspec.Struct, frozen=True):
    reason: str
    count: int
    examples: list[str]  #: `line 7: at_ms is missing`; a few


class Latency(msgspec.Struct, frozen=True):
    """The latency of the requests that were ok."""

    from_intended: Quantiles | None  #: None without a schedule (`--speed max`)
    from_sent: Quantiles | None


class Rates(msgspec.Struct, frozen=True):
    """Requests a second, all three over one window. None if there are less than two requests, or than a millisecond.

    The window begins when the first request is due. It ends when the last one is due or sent, or when nine of ten of
    those that are ok were answered, whichever is later. So no late failure and no single late answer extends it.
    """

    scheduled: float | None  #: due in the window; None without a schedule
    sent: float | None  #: sent in the window
    ok: float | None  #: answered in the window
    window_s: float | None = None  #: None: an earlier version computed each rate over a span of its own


class Carried(msgspec.Struct, frozen=True):
    items: int
    nbytes: int


class Items(msgspec.Struct, frozen=True):
    count: int
    rows: int
    nbytes: int
    by_transport: dict[str, Carried]
    fallbacks: Carried | None  #: items that went inline though large enough for a pool; None if the transport is inline


class Step(msgspec.Struct, frozen=True):
    """A mark that the deployment sets on its requests. Steps are listed in the order in which requests reach them."""

    step: str
    requests: int
    since_sent: Quantiles
    since_previous: Quantiles  #: the mark before it in the same request, or the send


class Summary(msgspec.Struct, frozen=True):
    tensorferry: str
    trace: TraceSummary
    run: RunSummary
    requests: RequestCounts
    dropped: list[Reason]
    failed: list[Reason]
    latency_ms: Latency
    lateness_ms: Quantiles | None  #: of every send, against its intended time
    per_second: Rates
    items: Items
    pools: dict[str, PoolUse]  #: by the process that owns it, such as tokenizer-0
    steps: list[Step]
    invented: Invented
    machine: Machine | None = None  #: None: an earlier version did not record it

    @property
    def exit_status(self) -> int:
        """0: all requests sent are ok; 3: some failed, or the run ended early; 4: none is ok; 5: all are ok, but with
        --strict the load was not the recorded one."""
        if not self.requests.ok:
            return 4
        if self.requests.failed or self.run.interrupted or self.run.error:
            return 3
        return 5 if self.run.strict and self.run.degraded else 0


class Setup(msgspec.Struct, frozen=True):
    """The setup of a run, as the report states it."""

    deployment: str
    transport: str
    speed: Speed
    seed: int
    concurrency: int | None = None
    limit: int | None = None
    strict: bool = False
    #: Items of at least so many bytes should travel in a pool; None: all items should travel inline.
    pooled_from_nbytes: int | None = None
    command: Sequence[str] = ()
    config: Mapping[str, Any] = MappingProxyType({})
    date: str = ""  #: as `RunSummary` has it
    machine: Machine = Machine()


def drops_of(trace: Trace, preparation: Preparation, replay: Replay) -> list[Drop]:
    """Return every row that was read but not sent, in the order of the file."""
    reason = "interrupted" if replay.interrupted else "deployment_failed" if replay.start_ns else UNSENT
    unsent = [Drop(prepared.request.line, reason, "") for prepared in replay.unsent]
    return sorted([*trace.drops, *preparation.drops, *unsent], key=lambda drop: drop.line)


def summarise(
    trace: Trace,
    preparation: Preparation,
    replay: Replay,
    setup: Setup,
    *,
    pools: Mapping[str, PoolUse] | None = None,
    error: str = "",
) -> Summary:
    """Compute all numbers of a finished run. Assumes that the marks are on the clock of the run."""
    outcomes = replay.outcomes
    ok = [outcome for outcome in outcomes if outcome.status == "ok"]
    failed = [outcome for outcome in outcomes if outcome.status != "ok"]
    drops = drops_of(trace, preparation, replay)
    scheduled = setup.speed.ratio is not None
    lateness = quantiles(o.sent_ns - o.intended_ns for o in outcomes) if scheduled else None
    end_ns = max((o.done_ns for o in outcomes), default=0)
    from_intended = quantiles(o.done_ns - o.intended_ns for o in ok) if scheduled else None
    return Summary(
        tensorferry=__version__,
        trace=TraceSummary(
            str(trace.path),
            trace.sha256,
            trace.format,
            trace.origin,
            trace.span_ns / NS,
            trace.inversions,
            trace.notes,
            trace.outside,
            trace.glued,
            trace.drawn,
            trace.rate,
        ),
        run=RunSummary(
            deployment=setup.deployment,
            transport=setup.transport,
            speed=str(setup.speed),
            seed=setup.seed,
            concurrency=setup.concurrency,
            limit=setup.limit,
            sessions=replay.turns.mode,
            following=replay.turns.following,
            guessed_think_times=replay.turns.guessed,
            payload_sha256=preparation.payload_sha256,
            command=list(setup.command),
            config=dict(setup.config),
            pooled_from_nbytes=setup.pooled_from_nbytes,
            strict=setup.strict,
            duration_s=end_ns / NS,
            interrupted=replay.interrupted,
            degraded=lateness is not None and lateness.p99 > DEGRADED_LATENESS_MS,
            error=error,
            date=setup.date,
        ),
        requests=RequestCounts(
            trace.read,
            len(outcomes),
            len(ok),
            len(failed),
            len(drops),
            sum(o.delayed for o in outcomes),
            sum(o.waited for o in outcomes),
        ),
        dropped=_reasons((drop.reason, drop.line, drop.problem) for drop in drops),
        failed=_reasons((o.reason, o.request.request.line, o.problem) for o in failed),
        latency_ms=Latency(from_intended, quantiles(o.done_ns - o.sent_ns for o in ok)),
        lateness_ms=lateness,
        per_second=_rates(outcomes, scheduled=scheduled),
        items=_items(ok, setup.pooled_from_nbytes),
        pools=dict(pools or {}),
        steps=_steps(ok, replay.start_ns),
        invented=preparation.invented,
        machine=setup.machine,
    )


def quantiles(values_ns: Iterable[int]) -> Quantiles | None:
    """Compute quantiles in milliseconds from nanoseconds; None if there are no values."""
    ordered = sorted(values_ns)
    if not ordered:
        return None
    count = len(ordered)
    ranks = {f"p{percent}": -(-count * percent // 100) for percent in (50, 90, 99)}  # from 1
    p50, p90, p99 = (ordered[rank - 1] / 1e6 for rank in ranks.values())
    maxima = [name for name, rank in ranks.items() if rank == count]
    return Quantiles(p50, p90, p99, ordered[-1] / 1e6, count, maxima)


def _rates(outcomes: Sequence[Outcome], *, scheduled: bool) -> Rates:
    """Compute the rates. A request that is due or sent exactly as the window ends is not in it."""
    done_ns = sorted(outcome.done_ns for outcome in outcomes if outcome.status == "ok")
    ends_ns = [time for outcome in outcomes for time in (outcome.intended_ns, outcome.sent_ns)]
    ends_ns += done_ns[-(-len(done_ns) * 9 // 10) - 1 :][:1]
    window_ns = max(ends_ns, default=0)
    if len(outcomes) < 2 or window_ns < NS // 1000:
        return Rates(None, None, None, window_ns / NS)
    due = sum(outcome.intended_ns < window_ns for outcome in outcomes)
    sent = sum(outcome.sent_ns < window_ns for outcome in outcomes)
    answered = sum(time <= window_ns for time in done_ns)
    a_second = NS / window_ns
    return Rates(due * a_second if scheduled else None, sent * a_second, answered * a_second, window_ns / NS)


def _reasons(cases: Iterable[tuple[str, int, str]]) -> list[Reason]:
    """Count the reasons, the most frequent first."""
    counts: Counter[str] = Counter()
    examples: defaultdict[str, list[str]] = defaultdict(list)
    for reason, line, problem in cases:
        counts[reason] += 1
        if len(examples[reason]) < 3:
            examples[reason].append(f"line {line}: {problem}" if problem else f"line {line}")
    return [Reason(reason, count, examples[reason]) for reason, count in counts.most_common()]


def _items(ok: Sequence[Outcome], pooled_from_nbytes: int | None) -> Items:
    items: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    rows = fallbacks = fallback_nbytes = 0
    for item in (item for outcome in ok for item in outcome.items):
        items[item.transport] += 1
        nbytes[item.transport] += item.nbytes
        rows += item.rows
        if pooled_from_nbytes is not None and item.transport == "inline" and item.nbytes >= pooled_from_nbytes:
            fallbacks += 1
            fallback_nbytes += item.nbytes
    return Items(
        items.total(),
        rows,
        nbytes.total(),
        {transport: Carried(items[transport], nbytes[transport]) for transport in sorted(items)},
        None if pooled_from_nbytes is None else Carried(fallbacks, fallback_nbytes),
    )


def _steps(ok: Sequence[Outcome], start_ns: int) -> list[Step]:
    """Compute the steps, in the order of the requests that take the most of them.

    Times alone do not give the order, since requests without images skip steps and are fast.
    """
    since_sent: defaultdict[str, list[int]] = defaultdict(list)
    since_previous: defaultdict[str, list[int]] = defaultdict(list)
    orders: Counter[tuple[str, ...]] = Counter()
    for outcome in ok:
        sent_ns = previous_ns = start_ns + outcome.sent_ns
        steps = reached(mark for mark in outcome.marks if not mark.step.startswith(READ))
        orders[tuple(steps)] += 1
        for step, at_ns in steps.items():
            since_sent[step].append(at_ns - sent_ns)
            since_previous[step].append(at_ns - previous_ns)
            previous_ns = at_ns
    fullest = sorted(orders, key=lambda order: (len(order), orders[order]), reverse=True)
    in_order = dict.fromkeys(step for order in fullest for step in order)
    return [
        Step(step, len(since_sent[step]), *map(_quantiles, (since_sent[step], since_previous[step])))
        for step in in_order
    ]


def _quantiles(values_ns: Iterable[int]) -> Quantiles:
    """Compute the quantiles of at least one value."""
    found = quantiles(values_ns)
    assert found is not None
    return found
