"""One answer while an engine makes it: what has come, what the owner was told, and how it ended."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tensorferry.codecs import messages as wire
from tensorferry.stages.engines.base import Delta, EngineResult


class BadAnswer(ValueError):
    """An engine answered with what cannot travel."""


@dataclass(slots=True)
class Answer:
    """Grows by `add`. Raises BadAnswer for what cannot travel, naming it."""

    items: int  #: of the request
    most: int  #: tokens that were asked for
    stream: bool = False  #: whether its owner wants it as it comes
    token_ids: bytearray = field(default_factory=bytearray)
    at_ns: list[int] = field(default_factory=list)  #: when each token came
    texts: list[str] = field(default_factory=list)
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    digests: tuple[bytes, ...] = ()
    count: int = 0  #: of tokens; an engine that keeps them to itself says this alone
    _told: int = 0  #: tokens
    _told_texts: int = 0  #: entries of `texts`
    _before: tuple[int, int] = (0, 0)  #: these two, before the delta that came last

    @classmethod
    def whole(cls, result: object, items: int) -> Answer:
        """Of an engine that answers at once."""
        if not isinstance(result, EngineResult):
            raise BadAnswer(f"the engine answered with {result!r:.200}, which is no EngineResult")
        answer = cls(items, wire.MAX_OUTPUT_TOKENS)
        answer.token_ids += token_bytes(result.token_ids)
        answer.count = _count(result.output_tokens, "output_tokens")
        answer.texts.append(_text(result.text))
        answer.finish = _finish(result.finish)
        answer.digests = _digests(result.digests, items)
        return answer

    def add(self, delta: object, now_ns: int) -> None:
        if not isinstance(delta, Delta):
            raise BadAnswer(f"the engine's answer went on with {delta!r:.200}, which is no Delta")
        if self.finish:
            raise BadAnswer(f"the engine's answer went on after its end ({self.finish!r})")
        ids = token_bytes(delta.token_ids)
        new = len(ids) // 4
        if self.count + new > self.most:
            raise BadAnswer(f"the engine answered with over {self.most} tokens, which were asked for")
        if delta.logprobs and len(delta.logprobs) != new:
            raise BadAnswer(f"the engine gave {len(delta.logprobs)} logprobs for {new} tokens")
        self.token_ids += ids
        self.count += new
        self.at_ns += [now_ns] * new
        if delta.text:
            self.texts.append(_text(delta.text))
        self.logprobs += delta.logprobs
        if delta.finish:
            self.finish = _finish(delta.finish)
            self.cached_tokens = _count(delta.cached_tokens, "cached_tokens")
            self.digests = _digests(delta.digests, self.items)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def untold(self) -> int:
        """Tokens that the owner was not told of."""
        return self.count - self._told

    def next_delta(self, request: bytes, attempt: int, to: int, origin: wire.Origin) -> wire.Delta | None:
        """The next that the owner is to be told, `wire.MOST_DELTA_TOKENS` at most; None: nothing."""
        first, last = self._told, min(self.count, self._told + wire.MOST_DELTA_TOKENS)
        if first == last:
            return None
        text = "".join(self.texts[self._told_texts :]) if last == self.count else ""
        delta = wire.Delta(
            request,
            attempt,
            to,
            origin,
            first,
            bytes(self.token_ids[4 * first : 4 * last]),
            tuple(self.at_ns[first:last]),
            text,
            tuple(self.logprobs[first:last]),
        )
        self._before = self._told, self._told_texts
        self._told = last
        if last == self.count:
            self._told_texts = len(self.texts)
        return delta

    def tell_again(self) -> None:
        """The owner may have lost some of what it was told: it is told all from the start."""
        self._told = self._told_texts = 0
        self._before = (0, 0)

    def take_back(self) -> None:
        """The delta that came last was not sent."""
        self._told, self._told_texts = self._before


def token_bytes(given: object) -> bytes:
    """Token ids as they travel. Raises BadAnswer for what is no row of int32."""
    try:
        ids = np.array(given, "<i4")
    except (OverflowError, TypeError, ValueError) as problem:
        raise BadAnswer(f"the engine answered with token ids that are no row of int32: {problem}") from problem
    if ids.ndim != 1 or len(ids) > wire.MAX_OUTPUT_TOKENS:
        most = wire.MAX_OUTPUT_TOKENS
        raise BadAnswer(f"the engine answered with token ids of shape {ids.shape}, not a row of up to {most}")
    return ids.tobytes()


def _count(given: object, name: str) -> int:
    try:
        count = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count <= wire.MAX_OUTPUT_TOKENS:
        most = wire.MAX_OUTPUT_TOKENS
        raise BadAnswer(f"the engine answered with {name}={given!r:.200}, not a number up to {most}")
    return count


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise BadAnswer(f"the engine answered with text={given!r:.200}, which is no str")
    try:
        given.encode()
    except UnicodeEncodeError as problem:
        raise BadAnswer(f"the engine answered with text that is no UTF-8: {problem}") from problem
    return given


def _finish(given: object) -> str:
    if not isinstance(given, str) or len(given) > wire.MOST_NAME:
        raise BadAnswer(f"the engine answered with finish={given!r:.200}, not a word of up to {wire.MOST_NAME}")
    return given


def _digests(given: object, items: int) -> tuple[bytes, ...]:
    digests = tuple(given) if isinstance(given, Iterable) else (given,)
    if len(digests) not in (0, items) or not all(isinstance(each, bytes) and len(each) <= 64 for each in digests):
        wanted = f"not {items} byte strings of up to 64 bytes, nor none"
        raise BadAnswer(f"the engine answered with digests={given!r:.200}, {wanted}")
    return digests
