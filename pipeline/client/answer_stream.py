"""An answer as its client reads it: `async for delta in stream`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType

import msgspec

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import AnswerFailed
from tensorferry.pipeline.client.growing_answer import GrowingAnswer

Outcome = wire.Result | wire.Failed | wire.Busy


class AnswerStream:
    """Gives each stretch of the answer once, in order, whatever becomes of the processes that make it.

    `delta.token_ids` are int32, little endian; `delta.at_ns` says when the engine gave out each token, of the clock of
    its node; `delta.text` is what the stretch adds to the text. What comes while nobody reads travels as one delta. The
    iteration ends with the answer, or raises AnswerFailed. Leaving the loop or the block, or `aclose`, before that
    cancels the request.
    """

    def __init__(self, cancel: Callable[[bytes], None]) -> None:
        self.request = b""  #: its id, set by the client
        self.outcome: Outcome | None = None  #: once there is one: a Result has the whole answer and its usage
        self._cancel = cancel
        self._answer = GrowingAnswer()
        self._unread: list[wire.Delta] = []
        self._came = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[wire.Delta]:
        try:
            while (delta := await self.next()) is not None:
                yield delta
        finally:  # a loop that is left drops this generator, which ends it here
            await self.aclose()

    async def next(self) -> wire.Delta | None:
        """What has come since the last call, and until something has; None: the answer is whole. Raises
        AnswerFailed."""
        while not self._unread and self.outcome is None:
            self._came.clear()
            await self._came.wait()
        if self._unread:
            unread, self._unread = self._unread, []
            return joined(unread)
        if not isinstance(self.outcome, wire.Result):
            assert self.outcome is not None
            raise AnswerFailed(self.outcome)
        return None

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give the answer up, unless it is whole."""
        if self.outcome is None:
            self._cancel(self.request)

    # --- what its client hears

    @property
    def tokens(self) -> int:
        """How many have come."""
        return len(self._answer.token_ids) // 4

    def begin_attempt(self) -> None:
        self._answer.begin_attempt()

    def add(self, delta: wire.Delta) -> None:
        """Raises StreamDiverged."""
        if (new := self._answer.add(delta)) is not None:
            self._unread.append(new)
            self._came.set()

    def finish(self, outcome: Outcome) -> None:
        """The outcome came, with what of the answer did not come before. Raises StreamDiverged."""
        if isinstance(outcome, wire.Result) and (outcome.token_ids or outcome.text) and self.outcome is None:
            self._add_rest(outcome)
        self.outcome = outcome
        self._came.set()

    def _add_rest(self, result: wire.Result) -> None:
        """What of a result did not come as a delta, at the time of the result."""
        first = self.tokens
        self._answer.begin_attempt()
        at_ns = max((mark.at_ns for mark in result.marks), default=0)
        count = len(result.token_ids) // 4
        whole = wire.Delta(
            result.request,
            result.attempt,
            0,
            wire.Origin("tokenizer", 0, 1),
            0,
            result.token_ids,
            (at_ns,) * count,
            result.text if result.text.startswith(self._answer.text) else self._answer.text,
            result.logprobs if len(result.logprobs) == count else (),
        )
        new = self._answer.add(whole)
        if new is None and (text := self._answer.take_text()):  # of tokens that have come
            new = msgspec.structs.replace(whole, first=first, token_ids=b"", at_ns=(), text=text, logprobs=())
        if new is not None:
            self._unread.append(new)


def joined(deltas: list[wire.Delta]) -> wire.Delta:
    """Stretches that follow each other, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[0],
        token_ids=b"".join(delta.token_ids for delta in deltas),
        at_ns=tuple(at_ns for delta in deltas for at_ns in delta.at_ns),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(each for delta in deltas for each in delta.logprobs),
    )
