"""From tokens and embeddings to the request that an engine takes, and from its answer to what a message carries."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadMessage
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.telemetry import traceparent
from tensorferry.stages.engines.base import EngineRequest, EngineResult

MOST_TOKENS = 1 << 20  #: of an answer: what a client may ask for


def contradiction(admit: wire.Admit, epoch: int) -> BadMessage | None:
    """What is wrong with a request before its embeddings are looked at; None: nothing. epoch: of this rank."""
    tokens, odd = divmod(len(admit.token_ids), 4)
    if odd:
        return BadMessage(f"token ids of {len(admit.token_ids)} bytes; int32 takes 4 each")
    if all(rank.epoch != epoch for rank in admit.schedulers):
        return BadMessage("this rank is not among the schedulers of the request")
    end = 0
    for index, span in enumerate(admit.spans):
        if span.offset < end:
            return BadMessage(f"span {index} is from token {span.offset} on, behind token {end}")
        end = span.offset + span.length
    return BadMessage(f"placeholders up to token {end} of {tokens}") if end > tokens else None


def check(admit: wire.Admit, embeddings: Mapping[int, Mapping[str, View]]) -> None:
    """Raise BadItem or BadMessage unless every placeholder has exactly one row of embeddings, all of one kind."""
    kind = None
    for index, span in enumerate(admit.spans):
        first = next(iter(embeddings[index].values()), None)
        rows = first.shape[0] if first is not None and first.shape else 0
        if first is None or rows != span.length:
            raise BadItem(index, f"{rows} rows of embeddings for {span.length} placeholders")
        kind = kind or (first.dtype, first.shape[1:])
        if (first.dtype, first.shape[1:]) != kind:
            raise BadItem(index, f"embeddings of {first.dtype} {first.shape[1:]} beside others of {kind}")
    if extra := embeddings.keys() - set(range(len(admit.spans))):
        raise BadMessage(f"embeddings for items {sorted(extra)}, which have no placeholders")


class Answer(NamedTuple):
    """An engine's answer as a message carries it."""

    output_tokens: int
    digests: tuple[bytes, ...]
    token_ids: bytes

    @classmethod
    def of(cls, result: object, items: int) -> Answer:
        """Raises ValueError naming what a message cannot carry. items: how many the request has."""
        if not isinstance(result, EngineResult):
            raise ValueError(f"the engine answered with {result!r:.200}, which is no EngineResult")
        return cls(_count(result.output_tokens), _digests(result.digests, items), _token_bytes(result.token_ids))


def _count(given: object) -> int:
    try:
        count = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count <= MOST_TOKENS:
        raise ValueError(f"the engine answered with output_tokens={given!r:.200}, not a number up to {MOST_TOKENS}")
    return count


def _digests(given: object, items: int) -> tuple[bytes, ...]:
    digests = tuple(given) if isinstance(given, Iterable) else (given,)
    if len(digests) not in (0, items) or not all(isinstance(each, bytes) and len(each) <= 64 for each in digests):
        wanted = f"not {items} byte strings of up to 64 bytes, nor none"
        raise ValueError(f"the engine answered with digests={given!r:.200}, {wanted}")
    return digests


def _token_bytes(given: object) -> bytes:
    try:
        ids = np.array(given, "<i4")
    except (OverflowError, TypeError, ValueError) as problem:
        raise ValueError(f"the engine answered with token ids that are no row of int32: {problem}") from problem
    if ids.ndim != 1 or len(ids) > MOST_TOKENS:
        raise ValueError(f"the engine answered with token ids of shape {ids.shape}, not a row of up to {MOST_TOKENS}")
    return ids.tobytes()


def splice(admit: wire.Admit, embeddings: Mapping[int, Mapping[str, View]]) -> EngineRequest:
    """Make the engine's request: items are in the order of their spans."""
    return EngineRequest(
        admit.request,
        np.frombuffer(admit.token_ids, "<i4"),
        [(span.offset, span.length) for span in admit.spans],
        [embeddings[item] for item in range(len(admit.spans))],
        admit.output_tokens,
        None if admit.context is None else traceparent.header(admit.context),
    )
