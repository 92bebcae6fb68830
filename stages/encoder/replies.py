"""What an encoder rank says of a job: embeddings to the scheduler ranks, or a failure to the owner of the request."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import structlog
from structlog.contextvars import bound_contextvars

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest, FerryError, PeerGone
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.pool.publisher import Draft
from tensorferry.pipeline.peers.peer import REPORTS, Peer
from tensorferry.pipeline.process.stage import Stage
from tensorferry.stages.encoder.batch_call import Made
from tensorferry.stages.failures import failure_of
from tensorferry.stages.finished_requests import FinishedRequests

log = structlog.get_logger()


class Replies:
    """See the module. A job that fails is noted as finished."""

    def __init__(self, stage: Stage, finished: FinishedRequests) -> None:
        self._stage, self._finished = stage, finished
        #: By scheduler rank: until when somebody waits (monotonic), and the job without its payloads.
        self._sent: dict[int, deque[tuple[float, wire.Encode]]] = defaultdict(lambda: deque(maxlen=REPORTS))

    def embeddings(self, job: wire.Encode, until_s: float, made: Sequence[Made], marks: tuple[wire.Mark, ...]) -> None:
        """Send the embeddings of a job to every rank of its attention group; if that fails, tell the owner.

        until_s: of the monotonic clock: nobody waits for them afterwards."""
        with bound_contextvars(request=job.request.hex()):
            try:
                self._send(job, until_s, made, marks)
            except Exception as problem:
                self._stage.outlive(problem)
                self.failed(job, problem)

    def failed(self, job: wire.Encode, problem: Exception) -> None:
        """Tell the owner of the request that this job failed."""
        self._finished.add(job.request, job.attempt)
        failure = failure_of(problem, self._stage.origin)
        if isinstance(problem, FerryError):
            log.info("failed", request=job.request.hex(), kind=failure.kind, problem=failure.problem)
        else:
            log.error("encode_crashed", request=job.request.hex(), exc_info=problem)
        with suppress(PeerGone):
            owner = self._stage.peers.get(job.owner.stage, job.owner.rank, job.owner.epoch)
            self._stage.peers.report(owner, wire.Failed(job.request, job.attempt, failure, owner.epoch))

    def report_possibly_lost(self, peer: Peer) -> None:
        """Tell the owners that this scheduler rank may lack the embeddings that it was sent last. An owner ignores that
        if the request is collected."""
        for until_s, job in self._sent.pop(peer.rank, ()):
            if time.monotonic() < until_s:
                self.failed(job, PeerGone(str(peer), "may not have received the embeddings: its connection broke"))

    def routes(self, job: wire.Encode, made: Sequence[Made]) -> list[tuple[Draft, int | None]]:
        """Every draft of a job with its column at each scheduler rank that is there."""
        routes: list[tuple[Draft, int | None]] = []
        for rank in job.schedulers:
            with suppress(PeerGone):  # `_send` reports it
                column = self._stage.peers.taker("scheduler", rank.rank, rank.epoch).column
                routes += [(draft, column) for item in made for draft in item.outputs.values()]
        return routes

    def _send(self, job: wire.Encode, until_s: float, made: Sequence[Made], marks: tuple[wire.Mark, ...]) -> None:
        """Send to every scheduler rank that attends to the request. Nothing in here may be awaited."""
        if not made:
            return
        if self._finished.is_finished(job.request, job.attempt):
            self._stage.counters.count("embeddings_late")
            return
        peers = [self._stage.peers.taker("scheduler", rank.rank, rank.epoch) for rank in job.schedulers]
        for peer in peers:
            frames: list[Buffer] = []
            items = tuple(
                wire.Embedding(
                    item.info.index,
                    item.info.rows,
                    tuple(
                        wire.Tensor(name, draft.dispatch(peer.column, frames, consumers=len(peers))[0])
                        for name, draft in item.outputs.items()
                    ),
                )
                for item in made
            )
            message = wire.Embeddings(job.request, job.attempt, peer.epoch, self._stage.origin, items, marks)
            self._post(peer, message, frames, made)
            self._sent[peer.rank].append((until_s, _without_payloads(job)))
        nbytes = sum(draft.nbytes for item in made for draft in item.outputs.values())
        log.debug("encoded", items=len(made), nbytes=nbytes, ms=round((marks[-1].at_ns - marks[0].at_ns) / 1e6, 1))

    def _post(self, peer: Peer, message: wire.Embeddings, frames: list[Buffer], made: Sequence[Made]) -> None:
        def send() -> None:
            nbytes, most = sum(map(len, frames)), self._stage.limits.inline_nbytes
            if nbytes > most:  # its receiver would break the connection
                raise BadRequest(
                    f"the pool has no room for {nbytes} bytes of embeddings, and a message carries {most >> 20} MiB "
                    "(limits.request_mb); raise embeddings_pool.budget_mb or limits.request_mb"
                )
            peer.outbox.send_nowait(message, frames)

        Draft.send_all([draft for item in made for draft in item.outputs.values()], peer.column, send)


def _without_payloads(job: wire.Encode) -> wire.Encode:
    """Enough of a job to report of it later."""
    return msgspec.structs.replace(job, encoders=(), schedulers=(), items=())
