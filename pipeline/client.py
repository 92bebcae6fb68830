"""A client of a running deployment: submit requests, get exactly one outcome for each."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, BadRequest, DeploymentError, PeerBusy
from tensorferry.codecs.frames import Buffer, Limits, decode, encode
from tensorferry.codecs.pool.pool import new_nonce
from tensorferry.pipeline.channels import Dealer, open_context
from tensorferry.pipeline.config import Deployment
from tensorferry.pipeline.parts import Part, prompt_on_wire
from tensorferry.pipeline.runtime import Runtime

log = structlog.get_logger()


Outcome = wire.Result | wire.Failed | wire.Busy

SLACK_S = 2.0  #: beyond a request's deadline, for its outcome to come


@dataclass(slots=True)
class _Door:
    """A tokenizer worker, as the client knows it."""

    rank: int
    dealer: Dealer
    members: wire.Members | None = None
    asked: int = 0  #: greetings since it last answered
    open: dict[bytes, asyncio.Future[Outcome]] = field(default_factory=dict)
    due: dict[bytes, float] = field(default_factory=dict)  #: when the outcome of each must be here, loop time


class Client:
    """See the module. Made by `connect`, within whose block it lives."""

    def __init__(self, deployment: Deployment, doors: Sequence[_Door], limits: Limits) -> None:
        self._deployment, self._limits = deployment, limits
        self._doors = doors
        self._owner: dict[bytes, _Door] = {}
        self._changed = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def connect(cls, deployment: Deployment, *, timeout_s: float = 30.0) -> AsyncIterator[Client]:
        """A client of a running deployment, once every stage of it is ready.

        Raises DeploymentError, naming who is missing, after timeout_s.
        """
        runtime = Runtime.of(deployment)
        if not runtime.directory.exists():
            raise DeploymentError(f"deployment {deployment.name!r} is not running; start it with `tensorferry up`")
        runtime.prepare()  # an address is believed only in a folder that is ours alone
        limits = Limits(inline_nbytes=deployment.limits.request_mb << 20)
        async with AsyncExitStack() as undo:
            context = undo.enter_context(open_context())
            doors = []
            for rank in range(deployment.tokenizer.workers):
                dealer = Dealer(context, runtime.front_door(rank), f"tokenizer-{rank}", limits, _refused)
                undo.callback(dealer.close)
                doors.append(_Door(rank, dealer))
            client = cls(deployment, doors, limits)
            # Not a task group: what the caller's block raises is to reach the caller as it is.
            tasks = [asyncio.create_task(client._listen(door)) for door in doors]
            tasks.append(asyncio.create_task(client._watch()))
            try:
                await client._wait_ready(timeout_s)
                yield client
            finally:
                for door in doors:
                    for request in list(door.open):
                        client.cancel(request)
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
    ) -> asyncio.Future[Outcome]:
        """Send a request; the future gives its one outcome.

        parts: the prompt, in order. deadline_s: after which it fails; the deployment's limit by default.
        request: 16 bytes, random by default; an id that is in flight is refused. Bytes are handed over: they must
        not change until the outcome is there. Paths are read here and now, each of `limits.item_mb` at most. Raises
        BadRequest; a tokenizer that does not keep up is an outcome (`Busy`), not an error.
        """
        request = request or secrets.token_bytes(16)
        if request in self._owner:
            raise BadRequest(f"request {request.hex()} is in flight already")
        frames: list[Buffer] = []
        wire_parts = prompt_on_wire(parts, frames, file_nbytes=self._deployment.limits.item_mb << 20)
        longest_s = self._deployment.limits.request_timeout_s
        deadline_s = longest_s if deadline_s is None else deadline_s
        if not deadline_s > 0:
            raise BadRequest(f"deadline_s of {deadline_s}: it must be more than 0")
        deadline_s = min(deadline_s, longest_s)
        submit = wire.Submit(request, 0, wire_parts, output_tokens, max(1, int(deadline_s * 1000)))
        _check(submit, frames, self._limits)
        door = min(self._doors, key=lambda door: (door.asked > 2, len(door.open)))  # one that answers, and has least
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        try:
            door.dealer.send_nowait(submit, frames)
        except PeerBusy as busy:
            future.set_result(wire.Busy(request, 0, 100, str(busy)))
            return future
        self._owner[request] = door
        door.open[request] = future
        door.due[request] = asyncio.get_running_loop().time() + deadline_s + SLACK_S
        return future

    async def submit(
        self,
        parts: Sequence[Part],
        *,
        output_tokens: int = 0,
        deadline_s: float | None = None,
        request: bytes | None = None,
    ) -> Outcome:
        """`submit_nowait`, and wait for the outcome; cancelled with the caller."""
        request = request or secrets.token_bytes(16)
        future = self.submit_nowait(parts, output_tokens=output_tokens, deadline_s=deadline_s, request=request)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    def cancel(self, request: bytes) -> None:
        """Ask for a request to be given up; its outcome still comes. No-op for one that is not in flight."""
        door = self._owner.get(request)
        if door is not None:
            self._say(door, wire.Cancel(request, 0))

    # --- the deployment

    def members(self) -> list[wire.Member]:
        """Every process that a tokenizer has told of, each once, with the gauges it last sent."""
        found = {
            (member.stage, member.rank): member
            for door in self._doors
            if door.members is not None
            for member in door.members.members
        }
        return [found[key] for key in sorted(found)]

    async def refresh(self, timeout_s: float = 5.0) -> list[wire.Member]:
        """`members`, asked for now. Raises TimeoutError."""
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
                while not all(door.members is not None and door.members.ready for door in self._doors):
                    await self._change()
        except TimeoutError:
            raise DeploymentError(
                f"deployment {self._deployment.name!r} is not ready after {timeout_s:g} s: {self._missing()}"
            ) from None

    def _missing(self) -> str:
        silent = [f"tokenizer-{door.rank} does not answer" for door in self._doors if door.members is None]
        waiting = [f"{m.stage}-{m.rank} is {m.state}" for m in self.members() if m.state != "ready"]
        return ", ".join(silent + waiting) or "its tokenizers wait for each other"

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # --- the sockets

    async def _listen(self, door: _Door) -> None:
        async for received in door.dealer:
            self._take(door, received.message)
            del received  # else its frames stay in use while the next is waited for

    def _take(self, door: _Door, message: wire.Message) -> None:
        match message:
            case wire.Members() as members:
                door.members, door.asked = members, 0
                self._changed.set()
            case wire.Result() | wire.Failed() | wire.Busy() as outcome:
                self._finish(door, outcome)
            case other:
                log.warning("message_refused", message=type(other).__name__)

    async def _watch(self) -> None:
        """Ask every tokenizer for a sign of life, for ever; one that gives none has lost what it had."""
        timeouts = self._deployment.timeouts
        patience = max(2, round(timeouts.quarantine_s / timeouts.heartbeat_s))
        while True:
            await asyncio.sleep(timeouts.heartbeat_s)
            for door in self._doors:
                door.asked += 1
                if door.asked > patience and door.open:
                    log.warning("tokenizer_gone", rank=door.rank, requests=len(door.open))
                    problem = f"tokenizer-{door.rank} does not answer; the deployment may have stopped"
                    self._lose(door, list(door.open), "PeerGone", problem)
                now = asyncio.get_running_loop().time()
                late = [request for request, due in door.due.items() if now > due]
                problem = f"tokenizer-{door.rank} gave no outcome within the deadline"
                self._lose(door, late, "DeadlineExceeded", problem)
                self._greet(door)

    def _lose(self, door: _Door, requests: Sequence[bytes], kind: str, problem: str) -> None:
        """Answer for a tokenizer that does not."""
        origin = wire.Origin("tokenizer", door.rank, door.members.origin.epoch if door.members else 1)
        for request in requests:
            failure = wire.Failure(kind, problem, origin, retryable=True)
            self._say(door, wire.Cancel(request, 0))  # should it come back
            self._finish(door, wire.Failed(request, 0, failure))

    def _finish(self, door: _Door, outcome: Outcome) -> None:
        future = door.open.pop(outcome.request, None)
        door.due.pop(outcome.request, None)
        self._owner.pop(outcome.request, None)
        if future is not None and not future.done():
            future.set_result(outcome)

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
        for door in self._doors:
            for future in door.open.values():
                if not future.done():
                    future.cancel()


def _check(submit: wire.Submit, frames: Sequence[Buffer], limits: Limits) -> None:
    """Raise BadRequest for what a tokenizer could not even decode, and so not answer."""
    try:
        decode(encode(submit, frames), limits)
    except (BadMessage, OverflowError, TypeError, ValueError) as problem:
        raise BadRequest(str(problem)) from None


def _refused(problem: BadMessage) -> None:
    log.warning("message_refused", problem=str(problem))
