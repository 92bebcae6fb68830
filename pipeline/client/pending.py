"""A request that has no outcome yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.client.answer_stream import AnswerStream, Outcome
from tensorferry.pipeline.client.door import Door


@dataclass(slots=True)
class Pending:
    submit: wire.Submit  #: as it was sent last
    frames: Sequence[Buffer]
    until: float  #: its deadline, loop time
    outcome: asyncio.Future[Outcome]
    door: Door | None = None  #: of the tokenizer that owns it; None while it waits to be sent again
    cancelled: bool = False  #: it is never sent again
    stream: AnswerStream | None = None  #: for whoever reads the answer as it comes

    def next_attempt(self, now: float) -> None:
        """Make `submit` the next attempt, with the time that is left at `now`, loop time."""
        left_ms = max(1, int((self.until - now) * 1000))
        self.submit = msgspec.structs.replace(self.submit, attempt=self.submit.attempt + 1, deadline_ms=left_ms)
        if self.stream is not None:
            self.stream.begin_attempt()

    def failed(self, failure: wire.Failure) -> wire.Failed:
        return wire.Failed(self.submit.request, self.submit.attempt, failure)

    def cancel_message(self) -> wire.Cancel:
        return wire.Cancel(self.submit.request, self.submit.attempt)
