"""A streamed answer on its way from the scheduler rank to the client."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import SlowClient
from tensorferry.pipeline.client.answer_stream import joined
from tensorferry.pipeline.client.growing_answer import GrowingAnswer
from tensorferry.stages.tokenizer.detokenizer import Detokenizer

MOST_HELD_S = 10.0  #: that a client takes nothing of an answer, before its request is given up


class AnswerRelay:
    """Of one request, over all attempts. Text that the engine does not make is made here.

    While the client's queue is full, tokens are held, no more of them than the answer may have, and then sent together.
    """

    def __init__(
        self, submit: wire.Submit, origin: wire.Origin, detokenizer: Detokenizer, send: Callable[[wire.Delta], bool]
    ) -> None:
        """origin: of the owner. send: to the client; False: its queue is full, and nothing was sent."""
        self._submit, self._origin, self._detokenizer, self._send = submit, origin, detokenizer, send
        self._answer = GrowingAnswer()
        self._engine_makes_text: bool | None = None  #: None: not known yet
        self._held: wire.Delta | None = None
        self._held_since_s = 0.0

    @property
    def tokens(self) -> int:
        """How many the answer has."""
        return len(self._answer.token_ids) // 4

    def begin_attempt(self) -> None:
        self._answer.begin_attempt()

    def take(self, delta: wire.Delta) -> bool:
        """Send on what is new. False: tokens before it are missing, as they were lost with a connection; it is dropped.

        The scheduler rank then tells the answer again from its start. Raises StreamDiverged, and SlowClient for a
        client that has taken nothing for MOST_HELD_S.
        """
        if delta.first > self._answer.seen:
            return False
        new = self._answer.add(delta)
        if new is None:
            return True
        new = msgspec.structs.replace(
            new, attempt=self._submit.attempt, to=0, origin=self._origin, text=self._text_of(new)
        )
        held, self._held = self._held, None
        whole = new if held is None else joined([held, new])
        if self._send(whole):
            return True
        now_s = time.monotonic()
        if held is None:
            self._held_since_s = now_s
        self._held = whole
        if now_s - self._held_since_s > MOST_HELD_S:
            raise SlowClient(len(whole.token_ids) // 4, now_s - self._held_since_s)
        return True

    def _text_of(self, new: wire.Delta) -> str:
        if self._engine_makes_text is None and new.text:
            self._engine_makes_text = True
        if self._engine_makes_text:
            return new.text
        text = self._detokenizer.add(np.frombuffer(new.token_ids, "<u4").tolist())
        if text:
            self._engine_makes_text = False
        return text
