"""An answer as it grows, over all attempts at it: each token once, in order, whichever attempt it came from.

A request that is sent again is answered anew from its first token. What of that is known already is compared and left
out, so whoever reads the answer does not see that it was sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import StreamDiverged


def is_repeatable(sampling: wire.Sampling | None) -> bool:
    """Whether an engine that is asked twice gives the same answer: greedy, or with a seed."""
    return sampling is None or sampling.temperature == 0 or sampling.seed is not None


@dataclass(slots=True)
class GrowingAnswer:
    """`add` what comes; `begin_attempt` when the request was sent again. A delta of the first token begins one too."""

    token_ids: bytearray = field(default_factory=bytearray)  #: int32, of all attempts
    text: str = ""
    _held: str = ""  #: text that came without a new token: it travels with the next one
    _seen: int = 0  #: tokens of the present attempt
    _seen_text: str = ""  #: of the present attempt, while it is shorter than `text`; afterwards empty
    _text_is_known: bool = True  #: whether the present attempt's text has come as far as `text`

    @property
    def seen(self) -> int:
        """How many tokens of the present attempt have come."""
        return self._seen

    def take_text(self) -> str:
        """Text that came without a new token, when no more tokens come."""
        text, self._held = self._held, ""
        return text

    def begin_attempt(self) -> None:
        self._seen, self._seen_text, self._text_is_known = 0, "", not self.text

    def add(self, delta: wire.Delta) -> wire.Delta | None:
        """The part of `delta` that is new; None: nothing is.

        Raises StreamDiverged if its tokens or its text differ from those that came before, or leave a gap.
        """
        count, known = len(delta.token_ids) // 4, len(self.token_ids) // 4
        if len(delta.token_ids) % 4 or len(delta.at_ns) != count or len(delta.logprobs) not in (0, count):
            raise StreamDiverged(delta.first, "its tokens, their times and their probabilities are not equally many")
        if delta.first == 0:
            self.begin_attempt()
        if delta.first != self._seen:
            raise StreamDiverged(delta.first, f"the token after {self._seen} was expected")
        self._seen += count
        old = min(count, known - delta.first)
        given = self.token_ids[4 * delta.first : 4 * (delta.first + old)]
        if delta.token_ids[: 4 * old] != given:
            raise StreamDiverged(delta.first, "an attempt that was sent again answers with other tokens")
        text = self._new_text(delta)
        self.token_ids += delta.token_ids[4 * old :]
        if old == count:
            self._held += text
            return None
        text, self._held = self._held + text, ""
        return msgspec.structs.replace(
            delta,
            first=delta.first + old,
            token_ids=delta.token_ids[4 * old :],
            at_ns=delta.at_ns[old:],
            text=text,
            logprobs=delta.logprobs[old:],
        )

    def _new_text(self, delta: wire.Delta) -> str:
        text = delta.text
        if not self._text_is_known:
            self._seen_text += text
            if not (self.text.startswith(self._seen_text) or self._seen_text.startswith(self.text)):
                raise StreamDiverged(delta.first, "an attempt that was sent again answers with another text")
            text = self._seen_text[len(self.text) :]
            if len(self._seen_text) >= len(self.text):
                self._text_is_known, self._seen_text = True, ""
        self.text += text
        return text
