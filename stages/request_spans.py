"""The spans of a request, and of a call of an encoder's adapter. They are made when it has ended, from known times.

A request's owner sends its spans, made from the marks of its outcome: one for the whole request, and inside it one for
each step, named as in reports. An encoder rank sends a span for each call, with links to the requests in it.

Source: OpenTelemetry semantic conventions for generative AI, spans of "Inference" and of "Embeddings".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.telemetry import traceparent
from tensorferry.pipeline.telemetry.span import Attribute, Span, new_span_id
from tensorferry.pipeline.telemetry.timeline import READ, SPANS, reached

#: The stage that a request is at before it reaches a mark; before all other marks it is at its owner.
_STAGES = {
    "encoding": "encoder",
    "encoded": "encoder",
    "collected": "scheduler",
    "running": "scheduler",
    "done": "scheduler",
}


def new_context(submit: wire.Submit) -> bytes:
    """The context of a request's own span: in its client's trace, or in a trace with the request's id."""
    if submit.context is not None:
        return traceparent.made(traceparent.trace_id(submit.context), new_span_id(), submit.context[24])
    trace = submit.request if any(submit.request) else new_span_id() * 2
    return traceparent.made(trace, new_span_id(), traceparent.SAMPLED)


class Ended(msgspec.Struct, frozen=True):
    """What the spans of a request are made of. Nothing here is large, because it waits to be sent."""

    request: bytes
    context: bytes
    parent: bytes | None  #: its client's context
    model: str
    most_tokens: int
    marks: tuple[wire.Mark, ...]  #: `received` among them
    at_ns: int
    items: tuple[wire.ItemReport, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: wire.Failure | None = None

    @classmethod
    def of(
        cls,
        submit: wire.Submit,
        context: bytes,
        model: str,
        outcome: wire.Result | wire.Failed,
        marks: Mapping[str, int],
        at_ns: int,
    ) -> Ended:
        """marks: those of its owner. Of a request that failed, no others are known."""
        begun = cls(submit.request, context, submit.context, model, submit.output_tokens, (), at_ns)
        if isinstance(outcome, wire.Failed):
            known = tuple(wire.Mark(step, reached_ns) for step, reached_ns in marks.items())
            return msgspec.structs.replace(begun, marks=known, failure=outcome.failure)
        return msgspec.structs.replace(
            begun,
            marks=outcome.marks,
            items=outcome.items,
            prompt_tokens=outcome.prompt_tokens,
            output_tokens=outcome.output_tokens,
        )

    def spans(self) -> Iterator[Span]:
        """The request's own span, then those of its steps, which follow each other without a gap."""
        steps = reached(mark for mark in self.marks if not mark.step.startswith(READ))
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.provider.name": "tensorferry",
            "gen_ai.request.model": self.model,
            "gen_ai.request.max_tokens": self.most_tokens,
            "tensorferry.request": self.request.hex(),
        }
        if self.failure is None:
            attributes |= {
                "gen_ai.usage.input_tokens": self.prompt_tokens,
                "gen_ai.usage.output_tokens": self.output_tokens,
                "tensorferry.items": len(self.items),
                "tensorferry.items_inline": sum(item.transport == "inline" for item in self.items),
                "tensorferry.nbytes": sum(item.nbytes for item in self.items),
            }
        else:
            origin = self.failure.origin
            attributes |= {"error.type": self.failure.kind, "tensorferry.origin": f"{origin.stage}-{origin.rank}"}
        start_ns = before_ns = steps.pop("received")
        yield Span(
            f"generate_content {self.model}",
            self.context,
            start_ns,
            max([self.at_ns, *steps.values()]),
            parent=self.parent or b"",
            remote=self.parent is not None,
            serves=True,
            attributes=attributes,
            problem=None if self.failure is None else self.failure.problem,
        )
        for step, reached_ns in steps.items():
            yield Span(
                SPANS.get(step, step),
                traceparent.made(traceparent.trace_id(self.context), new_span_id(), self.context[24]),
                before_ns,
                reached_ns,
                parent=self.context,
                attributes={"tensorferry.stage": _STAGES.get(step, "tokenizer")},
            )
            before_ns = reached_ns


def of_call(
    contexts: Sequence[bytes], model: str, rank: int, times_ns: tuple[int, int], items: int, patches: int
) -> Iterator[Span]:
    """A call of an encoder rank's adapter, in a trace of its own. contexts: those of the requests in it."""
    yield Span(
        f"embeddings {model}",
        traceparent.made(new_span_id() * 2, new_span_id(), traceparent.SAMPLED),
        *times_ns,
        attributes={
            "gen_ai.operation.name": "embeddings",
            "gen_ai.provider.name": "tensorferry",
            "gen_ai.request.model": model,
            "tensorferry.stage": "encoder",
            "tensorferry.rank": rank,
            "tensorferry.requests": len(contexts),
            "tensorferry.items": items,
            "tensorferry.patches": patches,
        },
        links=tuple(contexts),
    )
