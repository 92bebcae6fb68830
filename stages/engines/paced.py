"""An engine that streams made-up tokens at a set pace: for tests of streaming, and to measure what streaming costs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from hashlib import blake2b
from typing import Annotated

from msgspec import Meta

from tensorferry.codecs.errors import BadRequest
from tensorferry.codecs.messages import Sampling, TokenLogprob
from tensorferry.pipeline.deployment.spec import Spec
from tensorferry.stages.engines.base import Capacity, Delta, EngineRequest, Options
from tensorferry.stages.engines.discard import Duration, digest_of
from tensorferry.stages.plugin import read_options

LETTERS = range(ord("a"), ord("z") + 1)  #: as token ids; in a vocabulary of bytes they are these letters


class PacedOptions(Spec, frozen=True):
    first_ms: Duration = 0.0  #: until the first token of an answer
    token_ms: Duration = 0.0  #: from each token to the next
    requests: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024  #: answered at once
    tokens: Annotated[int, Meta(ge=1, le=1 << 40)] = 1 << 24  #: of these, prompts and answers
    digests: bool = False  #: answer with a digest of each item's embeddings, as `discard` does


def made_up(request: EngineRequest) -> bytes:
    """The answer, one letter a token: a function of the prompt and the seed. With a temperature and no seed it is
    another one each time."""
    chance = request.sampling.temperature > 0 and request.sampling.seed is None
    salt = secrets.token_bytes(8) if chance else repr(request.sampling.seed).encode()
    digest = blake2b(request.token_ids.tobytes() + salt).digest()
    letters = bytes(LETTERS[byte % len(LETTERS)] for byte in digest)
    return (letters * (request.output_tokens // len(letters) + 1))[: request.output_tokens]


class Paced:
    """Every answer has as many tokens as were asked for, unless a stop id comes first."""

    def __init__(self, options: Options) -> None:
        """options: those of PacedOptions. Raises ConfigError naming one that is wrong."""
        self._options = read_options("scheduler.options", "paced", PacedOptions, options)
        self.capacity = Capacity(self._options.requests, self._options.tokens)
        self.running = 0  #: answers that are not at their end

    async def start(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Nothing to leave behind."""

    async def submit(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Raises BadRequest for a field of `sampling` other than temperature, seed, stop_ids and logprobs."""
        asked = request.sampling
        known = Sampling(
            temperature=asked.temperature, seed=asked.seed, stop_ids=asked.stop_ids, logprobs=asked.logprobs
        )
        if unknown := [name for name in Sampling.__struct_fields__ if getattr(asked, name) != getattr(known, name)]:
            raise BadRequest(
                f"sampling.{unknown[0]} is {getattr(asked, unknown[0])!r}; the engine `paced` has no such choice"
            )
        digests: tuple[bytes, ...] = ()
        if self._options.digests:
            digests = tuple(digest_of(item, outputs) for item, outputs in enumerate(request.embeddings))
        logprobs = (TokenLogprob(0.0),) if asked.logprobs >= 0 else ()
        self.running += 1
        try:
            due = time.monotonic() + self._options.first_ms / 1e3
            for token in made_up(request):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due += self._options.token_ms / 1e3
                if token in asked.stop_ids:
                    yield Delta((token,), logprobs=logprobs, finish="stop", digests=digests)
                    return
                yield Delta((token,), logprobs=logprobs)
            yield Delta(finish="length", digests=digests)
        finally:
            self.running -= 1
