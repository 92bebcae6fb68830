"""A request as an engine takes it, with the embeddings of its items."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadMessage
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.telemetry import traceparent
from tensorferry.stages.engines.base import EngineItem, EngineRequest


def contradiction(admit: wire.Admit, epoch: int) -> BadMessage | None:
    """What is wrong with a request before its embeddings are looked at; None: nothing. epoch: of this rank."""
    tokens, odd = divmod(len(admit.token_ids), 4)
    if odd:
        return BadMessage(f"token ids of {len(admit.token_ids)} bytes; int32 takes 4 each")
    if all(rank.epoch != epoch for rank in admit.schedulers):
        return BadMessage("this rank is not among the schedulers of the request")
    end = 0
    for index, item in enumerate(admit.items):
        for span in item.spans:
            if span.offset < end:
                return BadMessage(f"a span of item {index} is from token {span.offset} on, behind token {end}")
            end = span.offset + span.length
    return BadMessage(f"placeholders up to token {end} of {tokens}") if end > tokens else None


def check(admit: wire.Admit, embeddings: Mapping[int, Mapping[str, View]]) -> None:
    """Raise BadItem or BadMessage unless every placeholder has exactly one row of embeddings, all of one kind."""
    kind = None
    for index, item in enumerate(admit.items):
        placeholders = sum(span.length for span in item.spans)
        first = next(iter(embeddings[index].values()), None)
        rows = first.shape[0] if first is not None and first.shape else 0
        if first is None or rows != placeholders:
            raise BadItem(index, f"{rows} rows of embeddings for {placeholders} placeholders")
        kind = kind or (first.dtype, first.shape[1:])
        if (first.dtype, first.shape[1:]) != kind:
            raise BadItem(index, f"embeddings of {first.dtype} {first.shape[1:]} beside others of {kind}")
    if extra := embeddings.keys() - set(range(len(admit.items))):
        raise BadMessage(f"embeddings for items {sorted(extra)}, which have no placeholders")


def splice(admit: wire.Admit, embeddings: Mapping[int, Mapping[str, View]], deadline_ns: int) -> EngineRequest:
    """A request as the engine takes it: items in the order of their spans. deadline_ns: of this rank's clock."""
    items = [
        EngineItem(
            item.modality, item.grid, item.content_hash, tuple((span.offset, span.length) for span in item.spans)
        )
        for item in admit.items
    ]
    return EngineRequest(
        admit.request,
        np.frombuffer(admit.token_ids, "<i4"),
        [item.spans[0] for item in items],
        [embeddings[index] for index in range(len(items))],
        admit.output_tokens,
        None if admit.context is None else traceparent.header(admit.context),
        items,
        admit.sampling or wire.Sampling(),
        deadline_ns,
        admit.priority,
        admit.tenant,
    )
