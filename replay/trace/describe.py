"""The description of a trace in numbers, and of the parts that a replay would invent.

It takes one pass. Its memory does not grow with the rows, except by the names of sessions and blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import accumulate

import msgspec

from tensorferry.pipeline.recording.request import Image, Request
from tensorferry.replay.trace.exact_numbers import NS
from tensorferry.replay.trace.selection import Conversations
from tensorferry.replay.trace.trace_file import Recording, Tally

#: The intervals for the highest rate and the variation of counts.
STRETCHES_S = (1, 10, 60)


class Spread(msgspec.Struct, frozen=True):
    """The distribution of whole numbers. Quantiles are by nearest rank, so each is a value that occurred."""

    count: int
    total: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, values: Mapping[int, int]) -> Spread | None:
        """Compute the spread. values: the count of each value. Returns None if there is none."""
        count = sum(values.values())
        if not count:
            return None
        total = sum(value * often for value, often in values.items())
        ordered = sorted(values)
        passed = list(accumulate(values[value] for value in ordered))

        def at(percent: int) -> int:
            return ordered[bisect_left(passed, max(1, -(-count * percent // 100)))]

        return cls(count, total, total / count, at(50), at(90), at(99), ordered[-1])


class Arrivals(msgspec.Struct, frozen=True):
    """The arrivals of requests. A value is None if there are too few requests."""

    per_s: float | None  #: over the whole span
    busiest_per_s: dict[str, float]  #: in the busiest interval of 1, 10 and 60 seconds, which may start anywhere
    gap_cv: float | None  #: standard deviation of the gaps over their mean: 1 for Poisson, above for bursts
    dispersion: dict[str, float]  #: variance over mean of the counts in intervals of each length: 1 for Poisson
    most_at_once: int  #: the most requests at one instant
    longest_silence_s: float


class Images(msgspec.Struct, frozen=True):
    requests: int  #: with an image
    count: int
    per_request: Spread | None  #: over the requests with an image
    tokens: Spread | None  #: over the images whose tokens the trace gives
    known_by: dict[str, int]  #: the count of images given by data, path, size, tokens or number alone


class Sessions(msgspec.Struct, frozen=True):
    count: int
    requests: int  #: that belong to a session
    turns: Spread | None
    think_times: int  #: turns with a recorded delay after the turn before


class Blocks(msgspec.Struct, frozen=True):
    """Identities of blocks of prompts."""

    count: int
    different: int
    seen_before: float  #: share of blocks that an earlier request had, which an unbounded prefix cache would save


class Description(msgspec.Struct, frozen=True):
    file: str
    sha256: str
    format: str
    rows: int
    requests: int
    dropped: dict[str, int]
    examples: list[str]  #: `line 7: at_ms is missing`; the first few of each reason
    origin: str  #: of the first request, on the trace's own clock
    end: str
    span_s: float
    unit_decided: str  #: a sentence, if the numbers decided the unit of times because the trace does not say it
    inversions: int
    largest_fall_s: float
    glued: bool
    notes: dict[str, int]
    arrivals: Arrivals
    prompt_tokens: Spread | None  #: of text, or of text and images if the trace counts them together
    output_tokens: Spread | None
    images: Images
    sessions: Sessions | None
    blocks: Blocks | None
    invented: dict[str, int]  #: what a replay would invent, and for how many requests or images


class _Clock:
    """An accumulator of ascending times."""

    def __init__(self) -> None:
        self.first_ns = self.last_ns = 0
        self.count = 0
        self._gaps_squared = 0
        self._longest_ns = self._at_once = self._most_at_once = 0
        self._recent: dict[int, deque[int]] = {stretch: deque() for stretch in STRETCHES_S}
        self._busiest = dict.fromkeys(STRETCHES_S, 0)
        self._bins: dict[int, list[int]] = {stretch: [0, 0, 0, 0] for stretch in STRETCHES_S}

    def tick(self, at_ns: int) -> None:
        if not self.count:
            self.first_ns = self.last_ns = at_ns
        gap_ns = at_ns - self.last_ns
        self._gaps_squared += gap_ns * gap_ns
        self._longest_ns = max(self._longest_ns, gap_ns)
        self._at_once = 1 if gap_ns else self._at_once + 1
        self._most_at_once = max(self._most_at_once, self._at_once)
        self.last_ns = at_ns
        self.count += 1
        for stretch, recent in self._recent.items():
            recent.append(at_ns)
            while recent[0] <= at_ns - stretch * NS:
                recent.popleft()
            self._busiest[stretch] = max(self._busiest[stretch], len(recent))
            number, current, total, squares = self._bins[stretch]
            here = (at_ns - self.first_ns) // (stretch * NS)
            if here != number:
                self._bins[stretch] = [here, 1, total + current, squares + current * current]
            else:
                self._bins[stretch][1] = current + 1

    def arrivals(self) -> Arrivals:
        span_ns, gaps = self.last_ns - self.first_ns, self.count - 1
        cv = None
        if gaps > 1 and span_ns:
            mean = span_ns / gaps
            cv = max(0.0, self._gaps_squared / gaps - mean * mean) ** 0.5 / mean
        return Arrivals(
            per_s=gaps * NS / span_ns if span_ns else None,
            busiest_per_s={f"{s} s": self._busiest[s] / s for s in STRETCHES_S if span_ns >= s * NS},
            gap_cv=cv,
            dispersion={f"{s} s": self._dispersion(s) for s in STRETCHES_S if span_ns >= 10 * s * NS},
            most_at_once=self._most_at_once,
            longest_silence_s=self._longest_ns / NS,
        )

    def _dispersion(self, stretch: int) -> float:
        """Return the dispersion over whole intervals from the first request on, so without the last interval."""
        bins, _, total, squares = self._bins[stretch]
        mean = total / bins
        return (squares / bins - mean * mean) / mean


def describe(recording: Recording, survey: Tally, requests: Iterable[Request]) -> Description:
    """Describe a recording. requests: all its requests, in the order of time."""
    clock = _Clock()
    prompts, outputs, per_request, image_tokens = (Counter[int]() for _ in range(4))
    known_by: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    conversations, seen = Conversations(), set[int]()
    blocks = repeated = think_times = 0
    invented: Counter[str] = Counter()
    for request in requests:
        clock.tick(request.at_ns)
        tokens = request.text_tokens if request.text_tokens is not None else request.context_tokens
        if tokens is not None:
            prompts[tokens] += 1
            invented["prompts: token ids"] += 1
        outputs[request.output_tokens] += 1
        if request.images:
            per_request[len(request.images)] += 1
            for image in request.images:
                known_by[_known_by(image)] += 1
                if image.tokens:
                    image_tokens[image.tokens] += 1
        if whose := conversations.of(request) if survey.linked else request.session:
            turns[whose] += 1
        think_times += request.think_ns is not None
        for block in request.blocks:
            blocks += 1
            repeated += block in seen
            seen.add(block)
        if request.continues and turns[request.session] > 1:
            invented["prompts: answers of the turns before"] += 1
    invented += Counter(
        {
            "images: picture, of the recorded size": known_by["size"],
            "images: picture, of a size for the recorded tokens": known_by["tokens"],
            "images: size and picture": known_by["number"],
            "requests: output length": survey.notes["output_tokens_assumed"],
            "requests: number of images": survey.notes["number_of_images_assumed"],
            "requests: their time": 0 if recording.timed else clock.count,
            "requests: all of it, drawn from statistics": clock.count if recording.drawn else 0,
        }
    )
    return Description(
        file=str(recording.path),
        sha256=recording.sha256(),
        format=recording.name,
        rows=survey.read,
        requests=clock.count,
        dropped=dict(survey.dropped),
        examples=[f"line {drop.line}: {drop.problem}" for drop in survey.named],
        origin=recording.time_text(clock.first_ns) if clock.count else "none",
        end=recording.time_text(clock.last_ns) if clock.count else "none",
        span_s=(clock.last_ns - clock.first_ns) / NS,
        unit_decided=recording.decided,
        inversions=survey.inversions,
        largest_fall_s=survey.largest_fall_ns / NS,
        glued=survey.glued,
        notes=dict(survey.notes),
        arrivals=clock.arrivals(),
        prompt_tokens=Spread.of(prompts),
        output_tokens=Spread.of(outputs),
        images=Images(
            per_request.total(),
            known_by.total(),
            Spread.of(per_request),
            Spread.of(image_tokens),
            dict(known_by),
        ),
        sessions=_sessions(turns, think_times),
        blocks=Blocks(blocks, len(seen), repeated / blocks) if blocks else None,
        invented=dict(+invented),
    )


def _sessions(turns: Counter[str], think_times: int) -> Sessions | None:
    return Sessions(len(turns), turns.total(), Spread.of(Counter(turns.values())), think_times) if turns else None


def _known_by(image: Image) -> str:
    if image.data:
        return "data"
    if image.path:
        return "path"
    if image.width:
        return "size"
    return "tokens" if image.tokens else "number"
