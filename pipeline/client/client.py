"""A client of a running deployment: submit requests, get exactly one outcome for each.

A tokenizer that dies takes what it owned with it, and a connection that breaks what is on its way. The client sends
that again, under the same id and a higher attempt, to another worker or to the same once it answers; schedulers drop
the older attempt, and the client what comes of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, BadRequest, DeploymentError, PeerBusy
from tensorferry.codecs.frames import Buffer, Limits, decode, encode
from tensorferry.codecs.pool.pool import new_nonce
from tensorferry.pipeline.channels.channels import Dealer, open_context
from tensorferry.pipeline.channels.curve_keys import client_keys
from tensorferry.pipeline.channels.interface import Denial
from tensorferry.pipeline.client.argument_checks import REQUEST_NBYTES, check_arguments, check_list, check_sizes
from tensorferry.pipeline.client.prompt_parts import Part, prompt_on_wire
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.telemetry.traceparent import parse

log = structlog.get_logger()


Outcome = wire.Result | wire.Failed | wire.Busy

RETRY_MS = 100  #: before a request is offered again that nobody takes now
SILENT = 3  #: greetings without an answer, from which on a tokenizer gets nothing that another could take
MOST_DENIALS = 3  #: handshakes in a row that a front door hung up in, before its key is taken for another
SLACK_S = 2.0  #: beyond a request's deadline, for its outcome to come


@dataclass(slots=True)
class _Door:
    """A tokenizer worker, as the client knows it."""

    rank: int
    dealer: Dealer
    members: wire.Members | None = None
    asked: int = 0  #: greetings since it last answered
    denials: int = 0  #: handshakes that failed since then
    denied: str = ""  #: why it lets nobody in with the keys we have
    open: set[bytes] = field(default_factory=set)  #: requests it owns

    @property
    def ready(self) -> bool:
        return self.members is not None and self.members.ready


@dataclass(slots=True)
class _Request:
    """A request that has no outcome yet."""

    submit: wire.Submit  #: as it was sent last
    frames: Sequence[Buffer]
    until: float  #: its deadline, loop time
    outcome: asyncio.Future[Outcome]
    door: _Door | None = None  #: whose it is; None while it waits to be sent again
    cancelled: bool = False  #: it is given up: nobody gets it again


class Client:
    """See the module. Made by `connect`, within whose block it lives."""

    def __init__(self, deployment: Deployment, doors: Sequence[_Door], limits: Limits) -> None:
        self._deployment, self._limits = deployment, limits
        self._doors = doors
        self._requests: dict[bytes, _Request] = {}
        self._runtime = Runtime.of(deployment)
        self._changed = asyncio.Event()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, deployment: Deployment, *, timeout_s: float = 30.0, wait: bool = True
    ) -> AsyncIterator[Client]:
        """A client of a running deployment, once every stage of it is ready. Tokenizers that say nothing for
        `timeouts.quarantine_s` are not waited for where another is ready.

        Raises DeploymentError, naming who is missing, after timeout_s; at once where keys do not open a front door.
        wait=False: for a look at a deployment as it is: once all tokenizers have answered, ready or not, or after
        timeout_s.
        """
        runtime = Runtime.of(deployment)
        if runtime.network is None:
            if not runtime.directory.exists():
                raise DeploymentError(f"deployment {deployment.name!r} is not running; start it with `tensorferry up`")
            runtime.prepare()  # an address is believed only in a folder that is ours alone
        curve = None if deployment.security.keys is None else client_keys(deployment.security.keys)
        limits = Limits(inline_nbytes=deployment.limits.request_mb << 20)
        async with AsyncExitStack() as undo:
            context = undo.enter_context(open_context())
            doors: list[_Door] = []
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
                doors.append(_Door(rank, dealer))
            # Not a task group: what the caller's block raises is to reach the caller as it is.
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
                    if not door.denied:
                        client._say(door, wire.Drained(client._origin))
                    await door.dealer.flush(1.0)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                client._close()

    # --- requests

    def submit_nowait(
        self,
        parts: Sequence[Part],
        *,
        output_tokens: int = 0,
        deadline_s: float | None = None,
        request: bytes | None = None,
        traceparent: str | None = None,
    ) -> asyncio.Future[Outcome]:
        """Send a request; the future gives its one outcome.

        parts: the prompt, in order. deadline_s: after which it fails; the deployment's limit by default.
        request: 16 bytes, random by default; an id that is in flight is refused. traceparent: W3C's header, of the
        trace that it belongs to; a malformed one is left aside. Bytes are handed over: they must not change until the
        outcome is there. Paths are read here and now, each of `limits.item_mb` at most. Raises BadRequest, which names
        the argument, and DeploymentError outside the block of `connect`; a tokenizer that does not keep up is an
        outcome (`Busy`), not an error.
        """
        check_list(parts)
        check_arguments(output_tokens, deadline_s, request, traceparent)
        if self._closed:
            raise DeploymentError("this client is closed; submit within the block of Client.connect, or connect anew")
        request = secrets.token_bytes(REQUEST_NBYTES) if request is None else request
        if request in self._requests:
            raise BadRequest(f"request {request.hex()} is in flight already")
        frames: list[Buffer] = []
        wire_parts = prompt_on_wire(parts, frames, file_nbytes=self._deployment.limits.item_mb << 20)
        check_sizes(wire_parts, frames, self._limits)
        longest_s = self._deployment.limits.request_timeout_s
        deadline_s = longest_s if deadline_s is None else min(deadline_s, longest_s)
        context = None if traceparent is None else parse(traceparent)
        submit = wire.Submit(request, 0, wire_parts, output_tokens, max(1, int(deadline_s * 1000)), context)
        _check(submit, frames, self._limits)
        loop = asyncio.get_running_loop()
        sent = _Request(submit, frames, loop.time() + deadline_s, loop.create_future())
        self._requests[request] = sent
        try:
            self._send(sent)
        except PeerBusy as busy:
            self._finish(wire.Busy(request, 0, RETRY_MS, str(busy)))
        return sent.outcome

    async def submit(
        self,
        parts: Sequence[Part],
        *,
        output_tokens: int = 0,
        deadline_s: float | None = None,
        request: bytes | None = None,
        traceparent: str | None = None,
    ) -> Outcome:
        """`submit_nowait`, and wait for the outcome; cancelled with the caller."""
        request = secrets.token_bytes(REQUEST_NBYTES) if request is None else request
        future = self.submit_nowait(
            parts, output_tokens=output_tokens, deadline_s=deadline_s, request=request, traceparent=traceparent
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    def cancel(self, request: bytes) -> None:
        """Ask for a request to be given up; its outcome still comes. No-op for one that is not in flight.

        It is not sent again, whatever becomes of the tokenizer that has it.
        """
        sent = self._requests.get(request)
        if sent is None:
            return
        sent.cancelled = True
        if sent.door is not None:
            self._say(sent.door, wire.Cancel(request, sent.submit.attempt))
        else:
            self._finish_cancelled(sent)

    def _finish_cancelled(self, sent: _Request) -> None:
        """End a request that was cancelled, and that no tokenizer has."""
        failure = wire.Failure("Cancelled", "cancelled by the client", self._origin)
        self._finish(wire.Failed(sent.submit.request, sent.submit.attempt, failure))

    def _send(self, sent: _Request) -> None:
        """Hand it to a tokenizer that answers, and of these to the one that has least. Raises PeerBusy."""
        door = min(
            self._doors, key=lambda door: (bool(door.denied), door.asked >= SILENT, not door.ready, len(door.open))
        )
        door.dealer.send_nowait(sent.submit, sent.frames)
        sent.door = door
        door.open.add(sent.submit.request)

    def _send_again(self, request: bytes) -> None:
        """Send what a tokenizer has lost, if it still waits; later, if nobody would take it now."""
        sent = self._requests.get(request)
        if sent is None or sent.door is not None:
            return
        loop = asyncio.get_running_loop()
        if any(door.asked < SILENT and door.ready for door in self._doors):
            submit, left_ms = sent.submit, int((sent.until - loop.time()) * 1000)
            again = {"attempt": submit.attempt + 1, "deadline_ms": max(1, left_ms)}
            sent.submit = msgspec.structs.replace(submit, **again)
            with suppress(PeerBusy):
                self._send(sent)
                return
        loop.call_later(RETRY_MS / 1000, self._send_again, request)

    # --- the deployment

    def members(self) -> list[wire.Member]:
        """Every process that a tokenizer has told of, each once, with the gauges it last sent; of several tellers one
        to whom it is not ready counts."""
        found: dict[tuple[str, int], wire.Member] = {}
        for member in (member for door in self._doors if door.members is not None for member in door.members.members):
            known = found.setdefault((member.stage, member.rank), member)
            if known.state == "ready":  # else one tokenizer has said that it is not
                found[member.stage, member.rank] = member
        return [found[key] for key in sorted(found)]

    async def refresh(self, timeout_s: float = 5.0) -> list[wire.Member]:
        """`members`, asked for now. Raises TimeoutError, and DeploymentError where keys open no front door."""
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
        """Whether all tokenizers are ready; or some are, and the others have said nothing for long."""
        ready = [door for door in self._doors if door.ready]
        silent = [door for door in self._doors if door.members is None and door.asked > self._patience]
        return bool(ready) and len(ready) + len(silent) == len(self._doors)

    @property
    def _patience(self) -> int:
        """How many greetings a tokenizer may leave without an answer, before others get what it has."""
        timeouts = self._deployment.timeouts
        return max(2, round(timeouts.quarantine_s / timeouts.heartbeat_s))

    def _missing(self) -> str:
        silent = [
            door.denied or f"tokenizer-{door.rank} does not answer" for door in self._doors if door.members is None
        ]
        waiting = [f"{m.stage}-{m.rank} is {m.state}" for m in self.members() if m.state != "ready"]
        return ", ".join(silent + waiting) or "its tokenizers wait for each other"

    async def _change(self) -> None:
        """Raises DeploymentError where waiting is of no use: our keys open no front door."""
        self._check_denied()
        self._changed.clear()
        await self._changed.wait()
        self._check_denied()

    def _check_denied(self) -> None:
        if all(door.denied for door in self._doors):
            raise DeploymentError(
                f"deployment {self._deployment.name!r} does not let this client in: {self._doors[0].denied}"
            )

    def _denied(self, rank: int, denial: Denial) -> None:
        """A handshake failed. One that hung up may have been about to end: that is believed when it is said again."""
        door = self._doors[rank]
        door.denials += 1
        if not door.denied and (denial.final or door.denials >= MOST_DENIALS):
            door.denied = f"{door.dealer.peer} at {door.dealer.address}: {denial.reason} (see security.keys)"
            self._lost(door)
            door.members = None
            self._changed.set()

    # --- the sockets

    async def _listen(self, door: _Door) -> None:
        async for received in door.dealer:
            self._take(door, received.message)
            del received  # else its frames stay in use while the next is waited for

    def _take(self, door: _Door, message: wire.Message) -> None:
        match message:
            case wire.Members() as members:
                former, door.members, door.asked = door.members, members, 0
                door.denials, door.denied = 0, ""
                if former is not None and former.origin.epoch != members.origin.epoch:
                    self._lost(door)
                self._changed.set()
            case wire.Result() | wire.Failed() | wire.Busy() as outcome:
                sent = self._requests.get(outcome.request)
                if sent is None or sent.door is not door or sent.submit.attempt != outcome.attempt:
                    log.debug("outcome_late", request=outcome.request.hex())
                elif isinstance(outcome, wire.Busy) and outcome.attempt:  # it was accepted once, so it waits
                    self._put_back(sent, outcome.retry_ms)
                else:
                    self._finish(outcome)
            case other:
                log.warning("message_refused", message=type(other).__name__)

    async def _watch(self) -> None:
        """Ask every tokenizer for a sign of life, for ever; what one has that gives none is another's."""
        timeouts = self._deployment.timeouts
        while True:
            await asyncio.sleep(timeouts.heartbeat_s)
            for door in self._doors:
                door.asked += 1
                if door.asked > self._patience and door.open and any(other.asked < SILENT for other in self._doors):
                    self._lost(door)
                self._greet(door)
            self._changed.set()  # how long a tokenizer has been silent
            now = asyncio.get_running_loop().time()
            for sent in [sent for sent in self._requests.values() if now > sent.until + SLACK_S]:
                self._lose(sent, "DeadlineExceeded", "gave no outcome within the deadline")
            if all(door.denied for door in self._doors):
                for sent in list(self._requests.values()):
                    self._lose(sent, "Denied", f"does not let this client in: {self._doors[0].denied}")
            silent_s = min(door.asked for door in self._doors) * timeouts.heartbeat_s
            here = self._runtime.network is None  # else its folder may be on another machine
            stopped = here and silent_s > timeouts.quarantine_s and not self._runtime.directory.exists()
            if silent_s > timeouts.start_s or stopped:
                for sent in list(self._requests.values()):
                    self._lose(sent, "PeerGone", "does not answer; the deployment may have stopped")

    def _broke(self, rank: int) -> None:
        """The connection to a tokenizer broke. Answers to what it has would go to a client that is not there any more:
        to it we are another one now. What came before is taken first: one that ends has answered for what it had."""
        door = self._doors[rank]
        while (received := door.dealer.receive_nowait()) is not None:
            self._take(door, received.message)
        door.asked = max(door.asked, SILENT)
        self._lost(door)
        self._greet(door)

    def _lost(self, door: _Door) -> None:
        """A tokenizer is gone, or as good as that: others get what it had."""
        if door.open:
            log.warning("tokenizer_gone", rank=door.rank, requests=len(door.open))
        for request in list(door.open):
            sent = self._requests[request]
            self._say(door, wire.Cancel(request, sent.submit.attempt))  # should it come back
            self._put_back(sent, 0)

    def _put_back(self, sent: _Request, after_ms: int) -> None:
        """Nobody has it now; send it again, unless it was cancelled."""
        if sent.door is not None:
            sent.door.open.discard(sent.submit.request)
            sent.door = None
        if sent.cancelled:
            self._finish_cancelled(sent)
            return
        asyncio.get_running_loop().call_later(after_ms / 1000, self._send_again, sent.submit.request)

    def _lose(self, sent: _Request, kind: str, problem: str) -> None:
        """Answer for tokenizers that do not."""
        door = sent.door
        name, origin = "the deployment", self._origin
        if door is not None:
            name = f"tokenizer-{door.rank}"
            origin = wire.Origin("tokenizer", door.rank, door.members.origin.epoch if door.members else 1)
            self._say(door, wire.Cancel(sent.submit.request, sent.submit.attempt))  # should it come back
        failure = wire.Failure(kind, f"{name} {problem}", origin, retryable=True)
        self._finish(wire.Failed(sent.submit.request, sent.submit.attempt, failure))

    def _finish(self, outcome: Outcome) -> None:
        sent = self._requests.pop(outcome.request)
        if sent.door is not None:
            sent.door.open.discard(outcome.request)
        if not sent.outcome.done():
            sent.outcome.set_result(outcome)

    @property
    def _origin(self) -> wire.Origin:
        return wire.Origin("client", 0, new_nonce())

    def _greet(self, door: _Door) -> None:
        self._say(door, wire.Hello(wire.PROTOCOL_VERSION, self._origin, "client"))

    def _say(self, door: _Door, message: wire.Message) -> None:
        try:
            door.dealer.send_nowait(message)
        except PeerBusy as busy:
            log.warning("not_sent", message=type(message).__name__, reason=str(busy))

    def _close(self) -> None:
        for sent in self._requests.values():
            sent.outcome.cancel()
        self._requests.clear()


def _check(submit: wire.Submit, frames: Sequence[Buffer], limits: Limits) -> None:
    """Raise BadRequest for what a tokenizer could not even decode, and so not answer."""
    try:
        decode(encode(submit, frames), limits)
    except (BadMessage, OverflowError, TypeError, ValueError) as problem:
        raise BadRequest(str(problem)) from None


def _refused(problem: BadMessage) -> None:
    log.warning("message_refused", problem=str(problem))
