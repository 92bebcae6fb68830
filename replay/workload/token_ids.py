"""Token ids for a trace that only counts them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.trace.seeds import choose

_CYCLE = 1 << 16


class TokenSource:
    """A source of invented prompts: seeded ids from a vocabulary without its special ids, since a deployment refuses
    image placeholders in text."""

    def __init__(self, vocabulary_size: int, special: Iterable[int], seed: int) -> None:
        """vocabulary_size: ids are below it. Raises ValueError if all ids are special."""
        ids = np.setdiff1d(np.arange(vocabulary_size, dtype=np.int32), np.fromiter(special, np.int32))
        if not len(ids):
            raise ValueError(f"a vocabulary of {vocabulary_size} ids, all of them special")
        self._seed, self._count = seed, len(ids)
        generator = np.random.Generator(np.random.PCG64(choose(seed, "tokens")))
        noise = generator.integers(0, len(ids), _CYCLE, np.int64)
        # Both are doubled, so that a run needs no wrapping, which would cost time for every prompt.
        self._ids, self._noise = np.concatenate([ids, ids]), np.concatenate([noise, noise])

    def ids(self, request: Request, count: int) -> npt.NDArray[np.int32]:
        """Return the `count` token ids of a request, shape (count,).

        If the trace gives an identity to each block of the prompt, equal identities become equal tokens, so that
        prompts with a common prefix in the trace have one again. Otherwise the line decides.
        """
        parts, at = [], 0
        for block in request.blocks:
            if at >= count:
                break
            parts.append(self._run(min(request.block_tokens, count - at), "block", block))
            at += len(parts[-1])
        if at < count or not parts:
            parts.append(self._run(count - at, "line", request.place))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def answer(self, request: Request) -> npt.NDArray[np.int32]:
        """Return the ids that represent the answer to a request in later prompts, shape (request.output_tokens,)."""
        return self._run(request.output_tokens, "answer", request.place)

    def _run(self, count: int, kind: str, identity: int | str) -> npt.NDArray[np.int32]:
        """Return a part of the noise that starts at one of its places and is shifted by up to the number of ids.

        With a vocabulary of 50,000 there are 3e9 different parts, so two identities hardly ever get the same.
        """
        place = choose(self._seed, kind, identity)
        start, shift = place % _CYCLE, (place >> 16) % self._count
        if count <= _CYCLE:
            noise = self._noise[start : start + count]
        else:
            noise = np.take(self._noise, np.arange(start, start + count), mode="wrap")
        drawn: npt.NDArray[np.int32] = self._ids[noise + shift]
        return drawn
