"""Tensors from process to process: how long one takes, and how many go through with several in flight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.contenders import CONTENDERS
from benchmarks.pair import Pair, Round
from benchmarks.results import Measurement, Outcome, Scale, Verdict, measurement, quantile, speedup

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POOL_NBYTES = 256 * MIB  #: as in `configs/local.yaml`
_SMALLEST_NBYTES = 4 * KIB  #: one row, one page

_OURS = ("in place", "copied in", "copied in, no supervisor")
_SAFE = ("send_pyobj, torch", "send_pyobj, numpy", "pickle 5", "msgpack frames", "torch queue")
_DRIVEN_OTHERWISE = ("msgpack frames, zmq.asyncio", "msgpack frames, blocking")
_UNSAFE = ("pickle 5, unsafe", "msgpack frames, unsafe", "torch queue, unsafe")


def large(scale: Scale) -> Outcome:
    """8 MiB: an image of two megapixels, about."""
    names = (*_OURS, *_SAFE, *_DRIVEN_OTHERWISE, *_UNSAFE)
    found = _one_at_a_time("8mib", "8 MiB, one in flight", scale, 8 * MIB, names, messages=16)
    return _judged(
        found,
        Verdict.of("in place: at most 1/6 of msgpack frames", speedup(found, "in place", "msgpack frames"), ">=", 6),
        Verdict.of("in place: at most 1/50 of send_pyobj", speedup(found, "in place", "send_pyobj, torch"), ">=", 50),
    )


def huge(scale: Scale) -> Outcome:
    """36 MiB: beyond what allocators keep, so that a rival's every message is made of pages never touched before."""
    names = (*_OURS, *_SAFE, *_DRIVEN_OTHERWISE, *_UNSAFE)
    found = _one_at_a_time("36mib", "36 MiB, one in flight", scale, 36 * MIB, names, messages=4)
    copied = found.of("copied in").details
    return _judged(
        found,
        Verdict.of("in place: at most 1/40 of msgpack frames", speedup(found, "in place", "msgpack frames"), ">=", 40),
        Verdict.of("copied in: at most 1/6 of msgpack frames", speedup(found, "copied in", "msgpack frames"), ">=", 6),
        Verdict.of("copied in: no page fault a message, producer", copied["producer_faults"], "<=", 0),
        Verdict.of("copied in: no page fault a message, consumer", copied["consumer_faults"], "<=", 0),
    )


def small(scale: Scale) -> Outcome:
    """64 KiB: all fixed cost."""
    names = (*_OURS, "inline", *_SAFE, *_DRIVEN_OTHERWISE, *_UNSAFE)
    found = _one_at_a_time("64kib", "64 KiB, one in flight", scale, 64 * KIB, names, messages=51, turns=3)
    return _judged(
        found,
        Verdict.of("in place: no slower than msgpack frames", speedup(found, "in place", "msgpack frames"), ">=", 1),
        Verdict.of("copied in: no slower than msgpack frames", speedup(found, "copied in", "msgpack frames"), ">=", 1),
    )


def inline(scale: Scale) -> Outcome:
    """8 MiB that the pool has no room for."""
    names = ("inline", "pickle 5", "msgpack frames", "pickle 5, unsafe", "msgpack frames, unsafe")
    found = _one_at_a_time("inline", "8 MiB inline, one in flight", scale, 8 * MIB, names, messages=16)
    return _judged(
        found, Verdict.of("inline: no slower than pickle 5 out of band", speedup(found, "inline", "pickle 5"), ">=", 1)
    )


def every_byte(scale: Scale) -> Outcome:
    """8 and 36 MiB, all of it written and read: what is left of the gain where producing and using count too."""
    names = (*_OURS, "pickle 5", "msgpack frames", "torch queue", *_UNSAFE)
    found: list[Measurement] = []
    for nbytes in (8 * MIB, 36 * MIB):
        part = _one_at_a_time("", "", scale, nbytes, names, messages=4, full=True)
        found += [_renamed(one, f"{nbytes // MIB} MiB {one.contender}") for one in part.measurements]
    return Outcome("every-byte", "8 and 36 MiB, one in flight, every byte written and read", tuple(found))


def pipelined(scale: Scale) -> Outcome:
    """8 MiB, eight in flight: throughput."""
    window = 8
    names = (*_OURS, *_SAFE, *_DRIVEN_OTHERWISE, *_UNSAFE)
    nbytes = max(_SMALLEST_NBYTES, scale.of(8 * MIB))
    messages = 4 * window
    rounds = _rounds(names, nbytes, scale, messages, window=window)
    found = Outcome(
        "pipelined",
        "8 MiB, eight in flight",
        tuple(
            measurement(
                name,
                "GiB/s",
                [messages * nbytes / GIB / (one.elapsed_ns / 1e9) for one in turns],
                safe=CONTENDERS[name].safe,
                details=_details(turns, messages, nbytes),
            )
            for name, turns in rounds.items()
        ),
    )
    copied, in_place = (speedup(found, ours, "msgpack frames") for ours in ("copied in", "in place"))
    return _judged(
        found,
        Verdict.of("copied in: at least 2.5 times msgpack frames", copied, ">=", 2.5),
        Verdict.of("in place: at least 10 times msgpack frames", in_place, ">=", 10),
    )


def _one_at_a_time(
    name: str,
    title: str,
    scale: Scale,
    nbytes: int,
    names: Sequence[str],
    *,
    messages: int,
    turns: int = 1,
    full: bool = False,
) -> Outcome:
    """Latencies. A turn's first message is not counted: it finds the caches as another contender left them.

    messages: of a turn. turns: of each contender, for each of the scale's.
    """
    nbytes = max(_SMALLEST_NBYTES, scale.of(nbytes))
    found = []
    scale = replace(scale, rounds=turns * scale.rounds)
    for contender, rounds in _rounds(names, nbytes, scale, messages, full=full).items():
        latencies_ms = [latency / 1e6 for one in rounds for latency in one.latencies_ns[1:]]
        safe, details = CONTENDERS[contender].safe, _details(rounds, messages, nbytes)
        found.append(measurement(contender, "ms", latencies_ms, safe=safe, details=details))
    return Outcome(name, title, tuple(found))


def _rounds(
    names: Sequence[str], nbytes: int, scale: Scale, messages: int, *, window: int = 1, full: bool = False
) -> dict[str, list[Round]]:
    """Every contender's turns: A B C, C B A, A B C and so on, after one that is not counted."""
    names = [name for name in names if scale.contenders is None or name in scale.contenders]
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    with ExitStack() as undo:
        pool_nbytes = scale.of(POOL_NBYTES)
        pairs = [
            undo.enter_context(Pair(name, nbytes, window=window, full=full, pool_nbytes=pool_nbytes)) for name in names
        ]
        for pair in pairs:
            pair.round(max(messages, 2 * window))
        for number in range(scale.rounds):
            for pair in pairs if number % 2 == 0 else reversed(pairs):
                rounds[pair.contender].append(pair.round(messages))
    return rounds


def _details(turns: Sequence[Round], messages: int, nbytes: int) -> dict[str, float]:
    """How long the producer's loop is held, page faults a message (both medians), CPU, and what arrived wrong."""
    cpu_ns = sum(turn.producer_cpu_ns + turn.consumer_cpu_ns for turn in turns)
    return {
        "producer_faults": quantile([turn.producer_faults / messages for turn in turns], 0.5),
        "consumer_faults": quantile([turn.consumer_faults / messages for turn in turns], 0.5),
        "held_ms": quantile([held for turn in turns for held in turn.held_ns], 0.5) / 1e6,
        "cpu_s_per_gib": cpu_ns / 1e9 / (messages * len(turns) * nbytes / GIB),
        "wrong": float(sum(turn.wrong for turn in turns)),
    }


def _judged(found: Outcome, *verdicts: Verdict) -> Outcome:
    return Outcome(found.name, found.title, found.measurements, verdicts)


def _renamed(one: Measurement, contender: str) -> Measurement:
    return Measurement(contender, one.unit, one.p50, one.p10, one.p90, one.samples, one.safe, one.details)
