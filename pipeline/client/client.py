"""A client of a running deployment: submit requests, get exactly one outcome for each.

When a tokenizer dies or its connection breaks, the client submits its requests again: under the same id and with the
next submission number, to another worker, or to the same worker once it answers. The older submission and its outcome
are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Unpack

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, BadRequest, DeploymentError, PeerBusy, StreamDiverged
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.pool.pool import new_nonce
from tensorferry.pipeline.channels.channels import Dealer, open_context
from tensorferry.pipeline.channels.curve_keys import client_keys
from tensorferry.pipeline.channels.interface import Denial
from tensorferry.pipeline.client.answer_stream import AnswerStream, Outcome
from tensorferry.pipeline.client.door import Door, Presence, SignsOfLife, members_reported
from tensorferry.pipeline.client.growing_answer import is_repeatable
from tensorferry.pipeline.client.pending import Pending
from tensorferry.pipeline.client.prompt_parts import Part
from tensorferry.pipeline.client.request_options import Chosen, RequestOptions
from tensorferry.pipeline.client.submission import Submission
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime

log = structlog.get_logger()

RETRY_MS = 100  #: before a request that no tokenizer takes now is offered again
SLACK_S = 2.0  #: beyond a request's deadline, for its outcome to arrive


class Client:
    """One connection to every tokenizer worker. `connect` makes it, and it is usable within that block."""

    def __init__(self, deployment: Deployment, doors: Sequence[Door], limits: Limits) -> None:
        self._deployment, self._limits = deployment, limits
        self._doors = doors
        self._requests: dict[bytes, Pending] = {}
        self._runtime = Runtime.of(deployment)
        self._changed = asyncio.Event()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, deployment: Deployment, *, timeout_s: float = 30.0, wait: bool = True
    ) -> AsyncIterator[Client]:
        """Yield a client once every stage of the running deployment is ready. A tokenizer that stays silent for
        `timeouts.quarantine_s` is not waited for if another is ready.

        After timeout_s, DeploymentError names the processes that are missing. It is raised at once if no front door
        accepts the keys. wait=False yields as soon as all tokenizers have answered, ready or not, or after timeout_s.
        """
        runtime = Runtime.of(deployment)
        if runtime.network is None:
            if not runtime.directory.exists():
                raise DeploymentError(f"deployment {deployment.name!r} is not running; start it with `tensorferry up`")
            runtime.prepare()  # addresses are trusted only in a folder that no other user can write to
        curve = None if deployment.security.keys is None else client_keys(deployment.security.keys)
        limits = Limits(inline_nbytes=deployment.limits.request_mb << 20)
        async with AsyncExitStack() as undo:
            context = undo.enter_context(open_context())
            doors: list[Door] = []
            client = cls(deployment, doors, limits)
            for rank in range(deployment.tokenizer.workers):
                dealer = Dealer(
                    context,
                    runtime.front_door(rank),
                    f"tokenizer-{rank}",
                    limits,
                    _refused,
                    on_break=partial(client._broke, rank),
                    curve=curve,
                    on_denied=partial(client._denied, rank),
                )
                undo.callback(dealer.close)
                doors.append(Door(rank, dealer, SignsOfLife(_patience(deployment))))
            # A task group would wrap what the caller's block raises.
            tasks = [asyncio.create_task(client._listen(door)) for door in doors]
            tasks.append(asyncio.create_task(client._watch()))
            try:
                if wait:
                    await client._wait_ready(timeout_s)
                else:
                    with suppress(TimeoutError):
                        await client.refresh(timeout_s)
                yield client
            finally:
                client._closed = True
                for request in list(client._requests):
                    client.cancel(request)
                for door in doors:
                    if door.presence is not Presence.DENIED:
                        client._say(door, wire.Drained(client._origin))
                    await door.dealer.flush(1.0)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                client._close()

    # --- requests

    def submit_nowait(self, parts: Sequence[Part], **options: Unpack[RequestOptions]) -> asyncio.Future[Outcome]:
        """Send a request; the future gives its one outcome.

        parts: the prompt, in order. Bytes must not change until the outcome is there. Paths are read before this
        returns, each of `limits.item_mb` at most. Raises BadRequest, which names the argument, and DeploymentError
        outside the block of `connect`. A tokenizer that does not keep up gives the outcome `Busy`, not an error.
        """
        return self._begin(parts, options).outcome

    async def submit(self, parts: Sequence[Part], **options: Unpack[RequestOptions]) -> Outcome:
        """`submit_nowait`, and wait for the outcome. The request is cancelled with the caller."""
        sent = self._begin(parts, options)
        try:
            return await asyncio.shield(sent.outcome)
        except asyncio.CancelledError:
            self.cancel(sent.submit.request)
            raise

    def stream(self, parts: Sequence[Part], **options: Unpack[RequestOptions]) -> AnswerStream:
        """As `submit_nowait`, for an answer that is read as the engine makes it.

        `async for delta in client.stream(...)`. An engine that does not stream gives it as one delta, at the end.
        """
        stream = AnswerStream(self.cancel)
        stream.request = self._begin(parts, options, stream).submit.request
        return stream

    def _begin(self, parts: Sequence[Part], options: RequestOptions, stream: AnswerStream | None = None) -> Pending:
        if self._closed:
            raise DeploymentError("this client is closed; submit within the block of Client.connect, or connect again")
        limits = self._deployment.limits
        submit, frames, deadline_s = Submission.of(
            parts, Chosen(**options), limits, self._limits, stream=stream is not None
        )
        if submit.request in self._requests:
            raise BadRequest(f"request {submit.request.hex()} is in flight already")
        loop = asyncio.get_running_loop()
        sent = Pending(submit, frames, loop.time() + deadline_s, loop.create_future(), stream=stream)
        self._requests[submit.request] = sent
        try:
            self._send(sent)
        except PeerBusy as busy:
            self._finish(wire.Busy(submit.request, 0, RETRY_MS, str(busy)))
        return sent

    def cancel(self, request: bytes) -> None:
        """Ask the tokenizer to give a request up; its outcome still arrives. No-op if it is not in flight.

        A cancelled request is never sent again, even if its tokenizer dies.
        """
        sent = self._requests.get(request)
        if sent is None:
            return
        sent.cancelled = True
        if sent.door is not None:
            self._say(sent.door, sent.cancel_message())
        else:
            self._finish_cancelled(sent)

    def _finish_cancelled(self, sent: Pending) -> None:
        """End a cancelled request that no tokenizer has."""
        failure = wire.Failure("Cancelled", "cancelled by the client", self._origin)
        self._finish(sent.failed(failure))

    def _send(self, sent: Pending) -> None:
        """Send it to the tokenizer with the fewest requests among those that answer. Raises PeerBusy."""
        denied, here = Presence.DENIED, Presence.HERE
        door = min(
            self._doors,
            key=lambda door: (door.presence is denied, door.presence is not here, not door.ready, len(door.open)),
        )
        door.dealer.send_nowait(sent.submit, sent.frames)
        sent.door = door
        door.open.add(sent.submit.request)

    def _send_again(self, request: bytes) -> None:
        """Send a request again if it still waits to be sent; later, if no tokenizer takes it now."""
        sent = self._requests.get(request)
        if sent is None or sent.door is not None:
            return
        loop = asyncio.get_running_loop()
        if any(door.presence is Presence.HERE and door.ready for door in self._doors):
            sent.next_attempt(loop.time())
            with suppress(PeerBusy):
                self._send(sent)
                return
        loop.call_later(RETRY_MS / 1000, self._send_again, request)

    # --- the deployment

    def members(self) -> list[wire.Member]:
        """Every process that a tokenizer has reported, each once, with its last gauges. If the tokenizers' reports of a
        process differ, one in which it is not ready counts."""
        return members_reported(door.members for door in self._doors if door.members is not None)

    async def refresh(self, timeout_s: float = 5.0) -> list[wire.Member]:
        """Ask all tokenizers for `members` now. Raises TimeoutError, and DeploymentError if no front door accepts our
        keys."""
        before = [door.members for door in self._doors]
        for door in self._doors:
            self._greet(door)
        async with asyncio.timeout(timeout_s):
            while any(door.members is known for door, known in zip(self._doors, before, strict=True)):
                await self._change()
        return self.members()

    async def _wait_ready(self, timeout_s: float) -> None:
        for door in self._doors:
            self._greet(door)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._usable():
                    await self._change()
            if silent := [door.rank for door in self._doors if not door.ready]:
                log.warning("tokenizers_silent", ranks=silent)
        except TimeoutError:
            raise DeploymentError(
                f"deployment {self._deployment.name!r} is not ready after {timeout_s:g} s: {self._missing()}"
            ) from None

    def _usable(self) -> bool:
        """Whether all tokenizers are ready, or at least one is ready and the others are overdue."""
        ready = [door for door in self._doors if door.ready]
        silent = [door for door in self._doors if door.members is None and door.life.is_overdue]
        return bool(ready) and len(ready) + len(silent) == len(self._doors)

    def _missing(self) -> str:
        silent = [
            door.life.denied or f"tokenizer-{door.rank} does not answer" for door in self._doors if door.members is None
        ]
        waiting = [f"{m.stage}-{m.rank} is {m.state}" for m in self.members() if m.state != "ready"]
        return ", ".join(silent + waiting) or "its tokenizers wait for each other"

    async def _change(self) -> None:
        """Wait until a tokenizer's state changes. Raises DeploymentError if no front door accepts our keys."""
        self._check_denied()
        self._changed.clear()
        await self._changed.wait()
        self._check_denied()

    def _check_denied(self) -> None:
        if self._all_denied:
            raise DeploymentError(
                f"deployment {self._deployment.name!r} does not let this client in: {self._doors[0].life.denied}"
            )

    @property
    def _all_denied(self) -> bool:
        return all(door.presence is Presence.DENIED for door in self._doors)

    def _denied(self, rank: int, denial: Denial) -> None:
        door = self._doors[rank]
        if door.life.handshake_failed(denial, f"{door.dealer.peer} at {door.dealer.address}"):
            self._lost(door)
            door.members = None
            self._changed.set()

    # --- the sockets

    async def _listen(self, door: Door) -> None:
        async for received in door.dealer:
            self._take(door, received.message)
            del received  # otherwise its frames stay in use during the wait for the next message

    def _take(self, door: Door, message: wire.Message) -> None:
        match message:
            case wire.Members() as members:
                former, door.members = door.members, members
                door.life.answered()
                if former is not None and former.origin.epoch != members.origin.epoch:
                    self._lost(door)
                self._changed.set()
            case wire.Result() | wire.Failed() | wire.Busy() as outcome:
                sent = self._requests.get(outcome.request)
                if sent is None or sent.door is not door or sent.submit.attempt != outcome.attempt:
                    log.debug("outcome_late", request=outcome.request.hex())
                elif isinstance(outcome, wire.Busy) and outcome.attempt:  # it was accepted before, so it waits
                    self._put_back(sent, outcome.retry_ms)
                else:
                    self._finish(outcome)
            case wire.Delta() as delta:
                sent = self._requests.get(delta.request)
                if sent is None or sent.door is not door or sent.submit.attempt != delta.attempt or not sent.stream:
                    log.debug("delta_late", request=delta.request.hex())
                    return
                try:
                    sent.stream.add(delta)
                except StreamDiverged as problem:
                    self._say(door, sent.cancel_message())
                    self._finish(sent.failed(self._diverged(problem)))
            case other:
                log.warning("message_refused", message=type(other).__name__)

    async def _watch(self) -> None:
        """Greet every tokenizer at each heartbeat, without end, and give the requests of one that is GONE to others."""
        timeouts = self._deployment.timeouts
        while True:
            await asyncio.sleep(timeouts.heartbeat_s)
            for door in self._doors:
                door.life.heartbeat_passed()
                here = any(other.presence is Presence.HERE for other in self._doors)
                if door.open and door.presence is Presence.GONE and here:
                    self._lost(door)
                self._greet(door)
            self._changed.set()  # silence has grown, and `_usable` looks at it
            now = asyncio.get_running_loop().time()
            for sent in [sent for sent in self._requests.values() if now > sent.until + SLACK_S]:
                self._lose(sent, "DeadlineExceeded", "gave no outcome within the deadline")
            if self._all_denied:
                for sent in list(self._requests.values()):
                    self._lose(sent, "Denied", f"does not let this client in: {self._doors[0].life.denied}")
            silent_s = min(door.life.unanswered for door in self._doors) * timeouts.heartbeat_s
            here = self._runtime.network is None  # else its folder may be on another machine
            stopped = here and silent_s > timeouts.quarantine_s and not self._runtime.directory.exists()
            if silent_s > timeouts.start_s or stopped:
                for sent in list(self._requests.values()):
                    self._lose(sent, "PeerGone", "does not answer; the deployment may have stopped")

    def _broke(self, rank: int) -> None:
        """The connection to a tokenizer broke. Answers go to the old connection, so its requests are sent again.
        Earlier messages are taken first, because a tokenizer that ends has answered its requests."""
        door = self._doors[rank]
        while (received := door.dealer.receive_nowait()) is not None:
            self._take(door, received.message)
        door.life.connection_broke()
        self._lost(door)
        self._greet(door)

    def _lost(self, door: Door) -> None:
        """Cancel a tokenizer's requests there, in case it comes back, and send them again."""
        if door.open:
            log.warning("tokenizer_gone", rank=door.rank, requests=len(door.open))
        for request in list(door.open):
            sent = self._requests[request]
            self._say(door, sent.cancel_message())
            self._put_back(sent, 0)

    def _put_back(self, sent: Pending, after_ms: int) -> None:
        """Take a request from its tokenizer, and send it again after a time, unless it was cancelled."""
        if sent.door is not None:
            sent.door.open.discard(sent.submit.request)
            sent.door = None
        if sent.cancelled:
            self._finish_cancelled(sent)
            return
        stream = sent.stream
        if stream is not None and stream.tokens and not is_repeatable(sent.submit.sampling):
            reason = (
                "its tokenizer is gone, and another attempt would answer otherwise, without temperature 0 or a seed"
            )
            self._finish(sent.failed(self._diverged(StreamDiverged(stream.tokens, reason))))
            return
        asyncio.get_running_loop().call_later(after_ms / 1000, self._send_again, sent.submit.request)

    def _lose(self, sent: Pending, kind: str, problem: str) -> None:
        """Fail a request that its tokenizer does not answer."""
        door = sent.door
        name, origin = "the deployment", self._origin
        if door is not None:
            name = f"tokenizer-{door.rank}"
            origin = wire.Origin("tokenizer", door.rank, door.members.origin.epoch if door.members else 1)
            self._say(door, sent.cancel_message())  # in case the tokenizer comes back
        failure = wire.Failure(kind, f"{name} {problem}", origin, retryable=True)
        self._finish(sent.failed(failure))

    def _finish(self, outcome: Outcome) -> None:
        sent = self._requests.pop(outcome.request)
        if sent.door is not None:
            sent.door.open.discard(outcome.request)
        if sent.stream is not None:
            try:
                sent.stream.finish(outcome)
            except StreamDiverged as problem:
                outcome = sent.failed(self._diverged(problem))
                sent.stream.finish(outcome)
        if not sent.outcome.done():
            sent.outcome.set_result(outcome)

    def _diverged(self, problem: StreamDiverged) -> wire.Failure:
        return wire.Failure("StreamDiverged", str(problem), self._origin, retryable=True)

    @property
    def _origin(self) -> wire.Origin:
        return wire.Origin("client", 0, new_nonce())

    def _greet(self, door: Door) -> None:
        self._say(door, wire.Hello(wire.PROTOCOL_VERSION, self._origin, "client"))

    def _say(self, door: Door, message: wire.Message) -> None:
        try:
            door.dealer.send_nowait(message)
        except PeerBusy as busy:
            log.warning("not_sent", message=type(message).__name__, reason=str(busy))

    def _close(self) -> None:
        for sent in self._requests.values():
            sent.outcome.cancel()
        self._requests.clear()


def _patience(deployment: Deployment) -> int:
    """How many greetings a tokenizer may leave unanswered before others get what it has."""
    timeouts = deployment.timeouts
    return max(2, round(timeouts.quarantine_s / timeouts.heartbeat_s))


def _refused(problem: BadMessage) -> None:
    log.warning("message_refused", problem=str(problem))
