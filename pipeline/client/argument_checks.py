"""Checks of a request before any of it is sent. An error names the argument, its value and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, BadRequest
from tensorferry.codecs.frames import Buffer, Limits, decode, encode

REQUEST_NBYTES = 16


def check_arguments(output_tokens: object, deadline_s: object, request: object, traceparent: object) -> None:
    """Raises BadRequest. The types need not have been checked."""
    if isinstance(output_tokens, bool) or not isinstance(output_tokens, int):
        raise BadRequest(f"output_tokens is {_shown(output_tokens)}; give an integer, 0 to {wire.MAX_OUTPUT_TOKENS}")
    if not 0 <= output_tokens <= wire.MAX_OUTPUT_TOKENS:
        raise BadRequest(f"output_tokens of {output_tokens}; 0 to {wire.MAX_OUTPUT_TOKENS} are possible")
    if deadline_s is not None:
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, Real):
            raise BadRequest(f"deadline_s is {_shown(deadline_s)}; give seconds as a number, or None")
        if not float(deadline_s) > 0:
            raise BadRequest(f"deadline_s of {deadline_s}; it must be more than 0")
    if request is not None and (not isinstance(request, bytes) or len(request) != REQUEST_NBYTES):
        has = f" of {len(request)} bytes" if isinstance(request, bytes) else ""
        raise BadRequest(f"request is {_shown(request)}{has}; give bytes, {REQUEST_NBYTES} of them, or None")
    if traceparent is not None and not isinstance(traceparent, str):
        raise BadRequest(f"traceparent is {_shown(traceparent)}; give the header as a str, or None")


def check_choices(sampling: object, priority: object, tenant: object) -> None:
    """Raises BadRequest for a choice of the wrong type; whether its numbers are in range is seen when it is encoded."""
    if sampling is not None and not isinstance(sampling, wire.Sampling):
        raise BadRequest(f"sampling is {_shown(sampling)}; give a tensorferry.Sampling, or None")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -100 <= priority <= 100:
        raise BadRequest(f"priority is {_shown(priority)}; give an integer, -100 to 100")
    if not isinstance(tenant, str) or len(tenant) > wire.MOST_TENANT:
        raise BadRequest(f"tenant is {_shown(tenant)}; give a name of up to {wire.MOST_TENANT} characters")


def check_list(parts: object) -> None:
    """Raises BadRequest for one text instead of a list of parts: each of its characters would become a part."""
    if isinstance(parts, str | bytes):
        raise BadRequest(f"parts is {_shown(parts)}; give a list, also of one part: [{_short(parts)}]")


def check_sizes(parts: Sequence[wire.Part], frames: Sequence[Buffer], limits: Limits) -> None:
    """Raises BadRequest for parts that exceed a message, each of them valid. limits: those of the front door."""
    if len(frames) >= limits.frames:
        raise BadRequest(
            f"parts have {len(frames)} files, pictures of videos and tensors; {limits.frames - 1} are possible"
        )
    if (nbytes := sum(memoryview(frame).nbytes for frame in frames)) > limits.inline_nbytes:
        raise BadRequest(
            f"parts have {nbytes} bytes of files and tensors; {limits.inline_nbytes} are possible (limits.request_mb: "
            f"{limits.inline_nbytes >> 20}); send fewer or smaller ones, or raise limits.request_mb"
        )
    nbytes = sum(len(part.text.encode()) for part in parts if isinstance(part, wire.TextPart))
    nbytes += sum(len(part.ids) for part in parts if isinstance(part, wire.TokensPart))
    if nbytes > limits.header_nbytes:
        raise BadRequest(f"parts have {nbytes} bytes of text and token ids; {limits.header_nbytes} are possible")


def check_decodes(submit: wire.Submit, frames: Sequence[Buffer], limits: Limits) -> None:
    """Raises BadRequest for a message that a tokenizer could not decode, and so could not answer."""
    try:
        decode(encode(submit, frames), limits)
    except (BadMessage, OverflowError, TypeError, ValueError) as problem:
        raise BadRequest(str(problem)) from None


def _shown(value: object) -> str:
    return f"the {type(value).__name__} {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
