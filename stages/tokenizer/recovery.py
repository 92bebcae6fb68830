"""What of a request is lost with a peer, and whether it is sent again: some items, or the whole request."""

from __future__ import annotations

import asyncio
import time

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import LethalRequest, PeerBusy, PeerGone, StreamDiverged
from tensorferry.pipeline.backoff import backoff_s
from tensorferry.pipeline.client.growing_answer import is_repeatable
from tensorferry.pipeline.process.stage import Stage
from tensorferry.stages.tokenizer.dispatch import Dispatch
from tensorferry.stages.tokenizer.request import Life, Reported, Request

log = structlog.get_logger()

RESEND_S, LONGEST_RESEND_S = 0.05, 1.0  #: before a request is sent again as a whole; doubled each time
MOST_LOSSES = 3  #: of processes with a part in a request, before the request is taken for the cause
MOST_REPORTED = 8  #: retryable failures of a request, before one is taken for the request's own


class Recovery:
    """Counts in each request what was lost with it."""

    def __init__(self, stage: Stage, dispatch: Dispatch) -> None:
        self._stage, self._dispatch = stage, dispatch

    def has_lost(self, request: Request) -> bool:
        """Whether a peer is lost with its part in this request."""
        return bool(self._lost_schedulers(request) or self._lost_items(request))

    async def unfinished(self, request: Request) -> list[int]:
        """Wait until all scheduler ranks have reported, and return no item; or until items are lost, and return those.

        Raises PeerGone when a scheduler rank is lost with its part, Reported when a peer has reported a failure, and
        LethalRequest.
        """
        while True:
            await request.news.wait()
            request.news.clear()
            if request.broken is not None:
                raise request.broken
            if request.failure is not None:
                raise Reported(request.failure)
            if not request.waiting:
                return []
            for life in self._lost_schedulers(request):
                self._count_loss(request, life)
                raise PeerGone(str(life.peer), "died, or fell silent, with what it had of the request")
            if items := self._lost_items(request):
                self._count_loss(request, request.owners[items[0]])
                self._stage.counters.count("items_sent_again", len(items))
                request.marks["sent_again"] = time.monotonic_ns()
                log.info("items_sent_again", items=items)
                return items

    async def start_again(self, request: Request, problem: PeerBusy | PeerGone | Reported) -> None:
        """Have all peers drop a request, so that it can be sent again as a whole after a pause.

        Raises the problem if the request must not be sent again.
        """
        if isinstance(problem, Reported):
            request.reported += 1
            if not problem.failure.retryable or request.reported > MOST_REPORTED:
                raise problem
        if request.sendings + 1 >= wire.SENDINGS:
            raise problem
        relay = request.relay
        if relay is not None and relay.tokens and not is_repeatable(request.submit.sampling):
            reason = f"{problem}; another attempt would answer otherwise, without temperature 0 or a seed"
            raise StreamDiverged(relay.tokens, reason) from problem
        self._stage.counters.count("requests_sent_again")
        log.info("sent_again", reason=str(problem))
        self._dispatch.cancel(request, request.told)
        pause_s = backoff_s(RESEND_S, LONGEST_RESEND_S, request.sendings)
        request.start_again()
        await asyncio.sleep(pause_s)

    def _count_loss(self, request: Request, life: Life) -> None:
        """Raise LethalRequest if too many processes were lost with this request: it may kill all others too."""
        request.losses += 1
        if request.losses > MOST_LOSSES:
            raise LethalRequest(request.losses, str(life.peer))

    def _lost_schedulers(self, request: Request) -> list[Life]:
        return request.lost_schedulers(elsewhere=bool(self._dispatch.groups()))

    def _lost_items(self, request: Request) -> list[int]:
        return request.lost_items(elsewhere=bool(self._stage.peers.usable("encoder")))
