"""The selection of requests of a trace: those of a window, or of a share of its conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.trace.seeds import choose


class Conversations:
    """The conversations of requests, which must be given in the order of time.

    It remembers ids, since a trace that names predecessors (Qwen-Bailian's) gives conversations only by them.
    """

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}  #: id of a request -> id of its conversation

    def of(self, request: Request) -> str:
        """Return the conversation's id, which is empty for a request without one."""
        if request.session:
            return request.session
        if not request.parent:
            return request.id and self._roots.setdefault(request.id, request.id)
        # Requests whose common predecessor came before the recording belong together too.
        root = self._roots.get(request.parent, request.parent)
        if request.id:
            self._roots[request.id] = root
        return root


class Selection(msgspec.Struct):
    """The requests from start_ns to end_ns (exclusive), in a share of the conversations."""

    start_ns: int | None = None
    end_ns: int | None = None
    share: float = 1.0  #: of the conversations, each of which stays whole; the rate falls by this factor
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
        """Return whether a conversation is in the share. It depends on the seed and the conversation alone."""
        if self.share >= 1:
            return True
        whose = conversations.of(request) or request.place
        return choose(self.seed, "share", whose) < self.share * 2**64
