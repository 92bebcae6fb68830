"""An engine that generates nothing: it counts requests, takes a given time, and can digest the embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import Spec
from tensorferry.stages.engines.base import EngineRequest, EngineResult, Options
from tensorferry.stages.plugin import read_options

FINGERPRINT_NBYTES = 32  #: width of the `fingerprint` adapter's embeddings

Duration = Annotated[float, Meta(ge=0, le=3_600_000)]


class DiscardOptions(Spec, frozen=True):
    service_ms: Duration = 0.0  #: how long a batch takes
    per_token_us: Duration = 0.0  #: and how much longer for each of its tokens, prompt and output
    digests: bool = False  #: answer with a digest of each item's embeddings


class DiscardStatistics(msgspec.Struct, frozen=True):
    """What the engine has finished so far, in counts."""

    batches: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    items: int
    rows: int  #: embeddings, over all items


class CorruptEmbeddings(FerryError):
    """The rows of an item's fingerprint are not all the same: embeddings were mixed up or overwritten."""

    def __init__(self, item: int, row: int) -> None:
        super().__init__(item, row)
        self.item, self.row = item, row

    def __str__(self) -> str:
        return f"item {self.item}: row {self.row} of its fingerprint belongs to another item, or was overwritten"


def digest_of(item: int, outputs: Mapping[str, View]) -> bytes:
    """The digest of an item's embeddings in a result.

    Of the `fingerprint` adapter's (`embeddings` is uint8 of width 32): the fingerprint itself, 32 bytes, once
    all rows and, where there is one, the `digest` output agree; CorruptEmbeddings otherwise. Of any other
    encoder's: the 16-byte BLAKE2b over the bytes of all outputs, in the order of their names.
    """
    rows = outputs.get("embeddings")
    if rows is None or rows.dtype != "uint8" or rows.shape[1:] != (FINGERPRINT_NBYTES,):
        digest = blake2b(digest_size=16)
        for name in sorted(outputs):
            digest.update(outputs[name].host().data.data)
        return digest.digest()
    rows = rows.host()
    whole = outputs.get("digest", rows).host().data[:FINGERPRINT_NBYTES]
    wrong = (rows.numpy() != whole).any(axis=1).nonzero()[0]
    if len(wrong):
        raise CorruptEmbeddings(item, int(wrong[0]))
    found: bytes = whole.tobytes()
    return found


class Discard:
    """Answers every request with the output tokens it asked for."""

    def __init__(self, options: Options) -> None:
        """options: those of DiscardOptions. Raises ConfigError naming one that is wrong."""
        self._options = read_options("scheduler.options", "discard", DiscardOptions, options)
        self._statistics = DiscardStatistics(0, 0, 0, 0, 0, 0)

    def statistics(self) -> DiscardStatistics:
        return self._statistics

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        """Return one result per request, or CorruptEmbeddings in its place; see `digest_of`."""
        prompt_tokens = sum(len(request.token_ids) for request in batch)
        output_tokens = sum(request.output_tokens for request in batch)
        service_us = self._options.service_ms * 1e3 + self._options.per_token_us * (prompt_tokens + output_tokens)
        if service_us:
            await asyncio.sleep(service_us / 1e6)
        if self._options.digests:  # off the loop: hashing takes a second per GiB
            results = await asyncio.to_thread(lambda: [_digested(request) for request in batch])
        else:
            results = [EngineResult(request.output_tokens) for request in batch]
        before, items = self._statistics, [outputs for request in batch for outputs in request.embeddings]
        self._statistics = DiscardStatistics(
            batches=before.batches + 1,
            requests=before.requests + len(batch),
            prompt_tokens=before.prompt_tokens + prompt_tokens,
            output_tokens=before.output_tokens + output_tokens,
            items=before.items + len(items),
            rows=before.rows + sum(length for request in batch for _, length in request.spans),
        )
        return results


def _digested(request: EngineRequest) -> EngineResult | Exception:
    try:
        digests = tuple(digest_of(item, outputs) for item, outputs in enumerate(request.embeddings))
    except CorruptEmbeddings as problem:
        return problem
    return EngineResult(request.output_tokens, digests)
