"""What the times in a request's outcome mean: each mark is when a step of its way was done."""

from __future__ import annotations

from collections.abc import Iterable

from tensorferry.codecs.messages import Mark

#: What happens up to each mark that the deployment sets; the last is up to the answer's arrival.
SPANS = {
    "received": "to the tokenizer",
    "planned": "planning",
    "processed": "processing",
    "sent": "hand-over",
    "encoding": "encoder queue",
    "encoded": "encoding",
    "collected": "to the scheduler",
    "running": "scheduler queue",
    "done": "engine",
    "answered": "answer",
}

#: A mark of one encoder rank, `read-3`: it had read its items' features, so they keep no place in a pool any more. No
#: step of the request, as the ranks of a request work beside each other.
READ = "read-"


def reached(marks: Iterable[Mark]) -> dict[str, int]:
    """When each step was, in the order of time. One that several processes reach for a request (encoder ranks)
    counts when the last of them has."""
    latest: dict[str, int] = {}
    for mark in marks:
        latest[mark.step] = max(mark.at_ns, latest.get(mark.step, 0))
    return dict(sorted(latest.items(), key=lambda pair: pair[1]))
