"""What an engine adapter is: the one thing to write to plug in a language model.

An engine has `run`, which answers a batch at once, or `submit`, which answers each request by itself, token by token.
With both, `submit` is used.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.messages import Sampling, TokenLogprob
from tensorferry.codecs.tensors import View

NEVER_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class EngineItem:
    """One image, video or audio of a request."""

    modality: str  #: image, video or audio
    #: Patches along time, height and width, before any merging; (0, 0, 0): not known, its embeddings came with the
    #: request.
    grid: tuple[int, int, int]
    content_hash: bytes  #: 32 bytes: equal ones mean equal features
    spans: tuple[tuple[int, int], ...]  #: (offset, length) of its placeholders among the tokens, in order


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A complete request. The tensors are the engine's own copies."""

    request: bytes
    token_ids: npt.NDArray[np.int32]  #: placeholders included
    spans: Sequence[tuple[int, int]]  #: per item: (offset, length) of its placeholders; of several stretches the first
    #: Per item: outputs by name; the first has one row for each placeholder. With a GPU transport they are on this
    #: rank's GPU, and complete for what the event loop's thread queues on its current stream. `View.host()` copies and
    #: waits.
    embeddings: Sequence[Mapping[str, View]]
    output_tokens: int  #: at most
    traceparent: str | None = None  #: for an engine with spans of its own: W3C's header, with this request as parent
    items: Sequence[EngineItem] = ()  #: what else is known of each item, in the same order
    sampling: Sampling = field(default_factory=Sampling)
    deadline_ns: int = NEVER_NS  #: of CLOCK_MONOTONIC; the request is cancelled then
    priority: int = 0  #: lower is more urgent
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class EngineResult:
    output_tokens: int
    digests: tuple[bytes, ...] = ()  #: one per item where the engine makes them
    token_ids: tuple[int, ...] = ()  #: the answer, where the engine gives it back
    text: str = ""  #: the answer, where the engine makes it text
    finish: str = ""  #: why it ended: "stop" or "length"; empty: not said


@dataclass(frozen=True, slots=True)
class Delta:
    """What has come to an answer since the delta before. The last one of an answer has `finish`, and may have no
    token."""

    token_ids: tuple[int, ...] = ()
    text: str = ""  #: what these tokens add to the text, for an engine that makes it text
    logprobs: tuple[TokenLogprob, ...] = ()  #: one per token, if `sampling.logprobs` is not -1
    finish: str = ""  #: "stop" (the model ended it, or a stop string or id), "length", or the engine's own word
    cached_tokens: int = 0  #: with `finish`: of the prompt, which the engine had computed before
    digests: tuple[bytes, ...] = ()  #: with `finish`: one per item where the engine makes them


class Capacity(NamedTuple):
    """What an engine works on at once. Everything beyond waits in the scheduler rank, by priority and tenant."""

    requests: int
    tokens: int  #: of prompts, and of answers as long as they may become


class EngineDied(FerryError):
    """The engine is dead, and every request with it: its rank ends, and `restarts` applies."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the engine has died: {self.reason}"


class Engine(Protocol):
    """A language model's scheduler that answers batches. Built once a rank from a SchedulerSpec."""

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        """Return one answer per request, in order; an Exception fails that request alone.

        The call is cancelled once every request of the batch is cancelled or past its deadline.
        """


class StreamingEngine(Protocol):
    """A language model's scheduler that answers each request by itself. Built once a rank from a SchedulerSpec."""

    capacity: Capacity

    async def start(self) -> None:
        """Become able to answer, within `timeouts.start_s`. The event loop runs on meanwhile. Raises ConfigError,
        EngineDied."""

    def submit(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """The answer, as an async generator. Nothing happens before its first step.

        It is closed (`aclose`) when nobody waits for the answer any more: cancelled, or past its deadline. The engine
        then spends nothing more on the request. A RequestError fails this request alone, as does any Exception but
        EngineDied. A field of `sampling` that the engine cannot honour is refused by name, as RequestError.
        """

    async def close(self) -> None:
        """Leave nothing behind: processes, shared memory, files. Called once, also after EngineDied."""


def is_streaming(engine: Engine | StreamingEngine) -> TypeGuard[StreamingEngine]:
    """Whether it answers request by request."""
    return callable(getattr(engine, "submit", None))


Options = Mapping[str, Any]
