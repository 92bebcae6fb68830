"""The contract of an engine adapter, the only class to write to plug in a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.tensors import View


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A complete request. The tensors are the engine's own copies."""

    request: bytes
    token_ids: npt.NDArray[np.int32]  #: placeholders included
    spans: Sequence[tuple[int, int]]  #: per item: (offset, length) of its placeholders
    #: Per item: outputs by name; the first has `length` rows. With a GPU transport they are on this rank's GPU, and
    #: complete for what the event loop's thread queues on its current stream; `View.host()` copies and waits.
    embeddings: Sequence[Mapping[str, View]]
    output_tokens: int
    traceparent: str | None = None  #: for an engine with spans of its own: W3C's header, with this request as parent


@dataclass(frozen=True, slots=True)
class EngineResult:
    output_tokens: int
    digests: tuple[bytes, ...] = ()  #: one per item where the engine makes them
    token_ids: tuple[int, ...] = ()  #: the answer, if the engine returns it this way; one that streams does not


class Engine(Protocol):
    """A language model's scheduler. Each rank builds one from a SchedulerSpec."""

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        """Return one answer per request, in order; an Exception fails that request alone.

        The call is cancelled once every request of the batch is cancelled or past its deadline.
        """


Options = Mapping[str, Any]
