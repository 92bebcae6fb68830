"""What a scheduler rank tells the owner of a request."""

from __future__ import annotations

import time
from contextlib import suppress

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerGone
from tensorferry.pipeline.process.stage import Stage
from tensorferry.stages.failures import failure_of
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.scheduler.answer import Answer
from tensorferry.stages.scheduler.engine_side import CompleteRequest

log = structlog.get_logger()


class Replies:
    """See the module. A request that is done or has failed is noted as finished."""

    def __init__(self, stage: Stage, finished: FinishedRequests) -> None:
        self._stage, self._finished = stage, finished

    def collected(self, admit: wire.Admit) -> None:
        """All embeddings of the request are here."""
        self._tell(admit.owner, wire.Collected(admit.request, admit.attempt, admit.owner.epoch, self._stage.origin))

    def is_over(self, one: CompleteRequest) -> bool:
        """Whether nobody waits for it any more."""
        return self._finished.is_finished(one.admit.request, one.admit.attempt)

    @property
    def origin(self) -> wire.Origin:
        """Of this rank."""
        return self._stage.origin

    def delta(self, admit: wire.Admit, delta: wire.Delta) -> bool:
        """The engine has made more of an answer. False: the owner's queue is full, and nothing was sent."""
        try:
            owner = self._stage.peers.get(admit.owner.stage, admit.owner.rank, admit.owner.epoch)
        except PeerGone:  # nobody waits for it
            return True
        return self._stage.peers.send(owner, delta)

    def expired(self, admit: wire.Admit) -> None:
        """The deadline has passed: its owner has given it up too, or is about to."""
        self._finished.add(admit.request, admit.attempt)
        self._stage.counters.count("requests_expired")

    def done(self, admit: wire.Admit, answer: Answer, marks: dict[str, int]) -> None:
        """The engine has answered."""
        if answer.at_ns:
            marks = {**marks, "first_token": answer.at_ns[0], "last_token": answer.at_ns[-1]}
        done = wire.Done(
            admit.request,
            admit.attempt,
            admit.owner.epoch,
            self._stage.origin,
            answer.count,
            answer.digests,
            tuple(wire.Mark(step, at_ns) for step, at_ns in {**marks, "done": time.monotonic_ns()}.items()),
            bytes(answer.token_ids),
            answer.text,
            answer.finish,
            answer.cached_tokens,
            tuple(answer.logprobs),
        )
        self._finished.add(admit.request, admit.attempt)
        self._tell(admit.owner, done)
        log.debug("done", request=admit.request.hex(), items=len(admit.items), output_tokens=answer.count)

    def failed(self, admit: wire.Admit, problem: Exception) -> None:
        """This rank gives the request up."""
        self._finished.add(admit.request, admit.attempt)
        failure = failure_of(problem, self._stage.origin, items=len(admit.items))
        log.info("failed", request=admit.request.hex(), kind=failure.kind, problem=failure.problem)
        self._tell(admit.owner, wire.Failed(admit.request, admit.attempt, failure, admit.owner.epoch))

    def _tell(self, owner: wire.Origin, message: wire.Collected | wire.Done | wire.Failed) -> None:
        with suppress(PeerGone):
            self._stage.peers.report(self._stage.peers.get(owner.stage, owner.rank, owner.epoch), message)
