"""A request as an engine takes it, the embeddings of its items spliced into its tokens; and the tokens it answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadMessage
from tensorferry.codecs.tensors import View
from tensorferry.pipeline import traceparent
from tensorferry.stages.engines.base import EngineRequest, EngineResult

MOST_TOKENS = 1 << 20  #: of an answer: what a client may ask for


def contradiction(admit: wire.Admit, epoch: int) -> BadMessage | None:
    """What is wrong with a request, whatever embeddings come for it; None: nothing. epoch: of this rank."""
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


def token_bytes(answer: EngineResult) -> bytes:
    """The tokens of an answer as they travel. Raises ValueError for what cannot."""
    try:
        ids = np.array(answer.token_ids, "<i4")
    except (OverflowError, TypeError, ValueError) as problem:
        raise ValueError(f"the engine answered with token ids that are no row of int32: {problem}") from problem
    if ids.ndim != 1 or len(ids) > MOST_TOKENS:
        raise ValueError(f"the engine answered with token ids of shape {ids.shape}, not a row of up to {MOST_TOKENS}")
    return ids.tobytes()


def splice(admit: wire.Admit, embeddings: Mapping[int, Mapping[str, View]]) -> EngineRequest:
    """A request as the engine takes it: items in the order of their spans."""
    return EngineRequest(
        admit.request,
        np.frombuffer(admit.token_ids, "<i4"),
        [(span.offset, span.length) for span in admit.spans],
        [embeddings[item] for item in range(len(admit.spans))],
        admit.output_tokens,
        None if admit.context is None else traceparent.header(admit.context),
    )
