"""Fewer requests of a trace: those of a window, or a share of its conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.trace.seeds import choose


class Conversations:
    """Which requests belong together. Remembers ids while it is asked in the order of time: a trace that names its
    predecessors (Qwen-Bailian's) says only through them which conversation a request is of."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}  #: of requests that have a predecessor or an id: of whose conversation

    def of(self, request: Request) -> str:
        """The same for all requests of a conversation; nothing for one that stands alone."""
        if request.session:
            return request.session
        if not request.parent:
            return request.id and self._roots.setdefault(request.id, request.id)
        # A predecessor before the start of the recording is one all the same: its children belong together.
        root = self._roots.get(request.parent, request.parent)
        if request.id:
            self._roots[request.id] = root
        return root


class Selection(msgspec.Struct):
    """Keeps the requests from start_ns to end_ns, exclusive, and of those the share of the conversations."""

    start_ns: int | None = None
    end_ns: int | None = None
    share: float = 1.0  #: of the conversations; the rate falls to so much, and every session stays whole
    seed: int = 0
    kept: int = 0
    left: int = 0

    def of(self, requests: Iterable[Request]) -> Iterator[Request]:
        conversations = Conversations()
        for request in requests:
            if self.within(request.at_ns) and self.drawn(conversations, request):
                self.kept += 1
                yield request
            else:
                self.left += 1

    def within(self, at_ns: int) -> bool:
        return (self.start_ns is None or at_ns >= self.start_ns) and (self.end_ns is None or at_ns < self.end_ns)

    def drawn(self, conversations: Conversations, request: Request) -> bool:
        """The same whatever else is kept: it depends on the seed and the conversation alone."""
        if self.share >= 1:
            return True
        whose = conversations.of(request) or request.place
        return choose(self.seed, "share", whose) < self.share * 2**64
