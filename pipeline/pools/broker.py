"""Passes the descriptors of a pool to the processes that read it, and learns of their deaths.

A UNIX socket per pool, for processes of the same user alone. One conversation admits one consumer:

    consumer    Attach: who I am, which pool             ->
                Exported, with memory, words, pidfd      <-    producer
    (maps)      Attached, with its ack page and pidfd    ->
                Admitted to a column                     <-

Either side may end it with Refused, or by hanging up. A consumer is admitted exactly when Admitted could be
queued for it: one that has given up meanwhile has closed its side first, so the producer never counts on a
reader that is not there, and no reader is forgotten that the producer counts on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self

import structlog

from tensorferry.codecs.errors import AttachRefused, FerryError, PeerGone
from tensorferry.codecs.messages import PROTOCOL_VERSION, Origin
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.lending import RECLAIM_AT_ONCE
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.system.descriptors import close_all
from tensorferry.pipeline.channels.readable_fd import readable
from tensorferry.pipeline.channels.socket_file import is_file
from tensorferry.pipeline.pools.conversation_places import SILENT_S, Place, Places
from tensorferry.pipeline.pools.fd_conversation import (
    REASON_LENGTH,
    Admitted,
    Attach,
    Attached,
    Exported,
    Line,
    Refused,
    check_process,
)

log = structlog.get_logger()

DEADLINE_S = 5.0  #: of a conversation; mapping a large pool takes a tenth of a second
CONVERSATIONS = 64  #: at once; others wait in the backlog, for as long as `places` says
BACKLOG = 4096
ACCEPT_RETRY_S = 0.1  #: when descriptors have run out


# --- the producer's side ---------------------------------------------------------------------------------


class Broker:
    """Serves one pool at a socket file, for the length of its `async with` block.

    Whoever makes it owns the path (see `Runtime.own`): a file left there by a former life is replaced.
    """

    def __init__(
        self,
        path: str,
        pool: Pool,
        on_admitted: Callable[[Origin, int], None],
        on_died: Callable[[Origin, int], None] = lambda origin, column: None,
        *,
        on_quarantined: Callable[[Origin, int], None] = lambda origin, column: None,
        on_refused: Callable[[], None] = lambda: None,
        deadline_s: float = DEADLINE_S,
        conversations: int = CONVERSATIONS,
    ) -> None:
        """on_admitted: a consumer reads this pool, and acknowledges in this column; called before it can know.

        on_died: its process is proven dead and its leases are written off. on_quarantined: it has acknowledged what
        nobody was lent, and can be dispatched nothing more. on_refused: a conversation did not end in an admission. All
        are called on the loop.
        """
        self.path = path
        self.refused = 0  #: conversations that did not end in an admission
        self._pool = pool
        self._on_admitted, self._on_died, self._on_quarantined = on_admitted, on_died, on_quarantined
        self._on_refused = on_refused
        self._origins: dict[int, Origin] = {}  # of the living, by column
        self._deadline_s = deadline_s
        self._places = Places(conversations)
        self._listeners = ExitStack()
        self._file = (0, 0)  # device and inode that we listen at
        self._conversations: asyncio.TaskGroup | None = None
        self._undo = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as undo:
            self._listeners = undo.enter_context(ExitStack())
            listener = self._listen()
            tasks = await undo.enter_async_context(asyncio.TaskGroup())
            serving = tasks.create_task(self._serve(listener), name="broker")
            undo.callback(serving.cancel)
            self._undo = undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._undo.__aexit__(kind, problem, trace)

    def mend(self) -> bool:
        """Listen anew where the socket file has been removed; False: it is there. Raises OSError."""
        if self._conversations is None or is_file(self.path, *self._file):
            return False
        self._conversations.create_task(self._accept(self._listen(), self._conversations), name="broker")
        return True

    def _listen(self) -> socket.socket:
        listener = self._listeners.enter_context(_listening(self.path))
        found = os.stat(self.path)
        self._file = found.st_dev, found.st_ino
        return listener

    def check_words(self) -> None:
        """Look for invalid acknowledgements, and log which consumers are quarantined for them."""
        for column in self._pool.check_words():
            origin = self._origins.get(column)
            if origin is not None:
                log.error("consumer_quarantined", stage=origin.stage, rank=origin.rank, column=column)
                self._on_quarantined(origin, column)

    async def _serve(self, listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._conversations = tasks
            await self._accept(listener, tasks)

    async def _accept(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        while True:
            with ExitStack() as undo:
                line = undo.enter_context(closing(Line(await _accepted(listener), "a consumer")))
                place = await self._places.take(line.pid)
                if place is None:
                    self._refuse(line, f"process {line.pid} has places enough, and says nothing in them")
                    continue
                undo.pop_all()
            conversation = tasks.create_task(self._converse(line, place, tasks), name="conversation")
            conversation.add_done_callback(partial(self._hang_up, line, place))

    def _hang_up(self, line: Line, place: Place, _: asyncio.Task[None]) -> None:
        line.close()
        self._places.give_back(place)

    async def _converse(self, line: Line, place: Place, tasks: asyncio.TaskGroup) -> None:
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                with place.ends(deadline):
                    await self._admit(line, place, tasks)
        except TimeoutError:
            if place.given_up:
                self._refuse(line, f"said nothing for {SILENT_S} s, while process {place.pid} had the most places")
            else:
                self._refuse(line, f"said nothing for so long that {self._deadline_s} s are over")
        except (FerryError, OSError) as problem:  # OSError: of descriptors, which are theirs, or have run out here
            self._refuse(line, str(problem))

    async def _admit(self, line: Line, place: Place, tasks: asyncio.TaskGroup) -> None:
        line.check_user()
        line.ask_who()
        with await line.hear(Attach) as letter:
            attach = letter.message
        place.hear()
        if attach.version != PROTOCOL_VERSION:
            raise AttachRefused(f"protocol version {attach.version}; {PROTOCOL_VERSION} is spoken here")
        if attach.pool != self._pool.description.pool:
            raise AttachRefused(f"pool {attach.pool} is not here; {self._pool.description.pool} is")
        with ExitStack() as sent:
            export, fds = self._pool.export()
            sent.callback(close_all, fds)
            line.say(Exported(export), fds)
        shares_pages = self._pool.mail is None
        with await line.hear(Attached, fds=(2, 3) if shares_pages else (1, 2)) as letter, ExitStack() as undo:
            process = letter.fds[1 if shares_pages else 0]
            check_process(process, letter.pid)
            pidfd = os.dup(process)  # the pool closes its own when it finds the death itself
            undo.callback(os.close, pidfd)
            column = self._pool.admit(letter.message.attachment, letter.take())
            undo.callback(self._pool.strike, column)
            line.say(Admitted(column))
            undo.pop_all()
            self._origins[column] = attach.origin
            watch = tasks.create_task(self._watch(attach.origin, column, pidfd), name="consumer watch")
            watch.add_done_callback(lambda _: os.close(pidfd))
            self._on_admitted(attach.origin, column)
        log.info("consumer_admitted", stage=attach.origin.stage, rank=attach.origin.rank, column=column)

    async def _watch(self, origin: Origin, column: int, pidfd: int) -> None:
        await readable(pidfd)
        self._pool.strike(column)
        del self._origins[column]
        log.info("consumer_died", stage=origin.stage, rank=origin.rank, column=column)
        self._on_died(origin, column)

    def _refuse(self, line: Line, reason: str) -> None:
        self.refused += 1
        self._on_refused()
        log.warning("consumer_refused", reason=reason)
        with suppress(FerryError):  # it has hung up, so it need not know
            line.say(Refused(reason[:REASON_LENGTH]))


async def recycle(pool: Pool, period_s: float, check: Callable[[], None] = lambda: None) -> None:
    """Take back what consumers have acknowledged, every `period_s`, until cancelled: also without new traffic.

    check: called before anything is taken back; `Broker.check_words`, and whatever else is to be looked at so often.
    """
    while True:
        check()
        more = pool.reclaim() == RECLAIM_AT_ONCE
        await asyncio.sleep(0 if more else period_s)


@contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    """A listening socket at `path`, of mode 0600 from its first moment; the file goes with the block."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ExitStack() as undo:
        listener.setblocking(False)
        os.fchmod(listener.fileno(), 0o600)  # bind makes the file with this mode. Source: unix_bind_bsd in Linux
        undo.callback(_unlink, path)
        _unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
        yield listener


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


async def _accepted(listener: socket.socket) -> socket.socket:
    while True:
        try:
            return listener.accept()[0]
        except BlockingIOError:
            await readable(listener.fileno())
        except OSError as problem:
            log.warning("accept_failed", problem=problem.strerror)
            await asyncio.sleep(ACCEPT_RETRY_S)


# --- the consumer's side ----------------------------------------------------------------------------------


async def attach(path: str, origin: Origin, pool: int, reader: Reader, timeout_s: float) -> int:
    """Map the pool of the broker at `path` into `reader`; returns the column its acknowledgements have there.

    origin: of this process. Raises AttachRefused with either side's reason, or PeerGone when the producer is not
    there, hangs up or is silent for `timeout_s`. After an error the pool is not attached, save where the
    producer has admitted us already and the answer was not read in time: what it then sends can be read.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _attach(path, origin, pool, reader)
    except TimeoutError:
        raise PeerGone(path, f"no answer within {timeout_s} s") from None


async def _attach(path: str, origin: Origin, pool: int, reader: Reader) -> int:
    with closing(Line(_connected(path), path)) as line, ExitStack() as undo:
        line.check_user()
        line.say(Attach(PROTOCOL_VERSION, origin, pool))
        with await line.hear(Exported, fds=(1, 2, 3)) as letter:
            export = letter.message.export
            if export.description.pool != pool:
                raise AttachRefused(f"{path} has pool {export.description.pool}; {pool} was announced")
            attachment, fds = await _mapped(reader, export, letter.take())
        undo.callback(reader.detach, pool)
        try:
            line.say(Attached(attachment), fds)
        finally:
            close_all(fds)
        undo.pop_all()
        undo.callback(_settle, line, reader, pool)
        with await line.hear(Admitted) as answer:
            undo.pop_all()
        return answer.message.column


def _settle(line: Line, reader: Reader, pool: int) -> None:
    """The conversation broke off after our part of it: forget the pool, unless we are admitted all the same."""
    if not line.shut_and_look(Admitted):
        reader.detach(pool)


def _connected(path: str) -> socket.socket:
    with ExitStack() as undo:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(made.close)
        made.setblocking(False)
        try:
            made.connect(path)  # at once or not at all, on a UNIX socket
        except OSError as problem:
            raise PeerGone(path, f"its broker cannot be reached: {problem.strerror}") from None
        undo.pop_all()
    return made


async def _mapped(reader: Reader, export: Export, fds: list[int]) -> tuple[Attachment, list[int]]:
    """`reader.attach` in a thread; if we are cancelled meanwhile it is undone there."""
    mapped: concurrent.futures.Future[tuple[Attachment, list[int]]] = concurrent.futures.Future()
    mapped.set_running_or_notify_cancel()  # so a cancelled waiter does not cancel what a thread is doing

    def attach() -> None:
        try:
            mapped.set_result(reader.attach(export, fds))
        except Exception as problem:
            mapped.set_exception(problem)

    threading.Thread(target=attach, name="attach").start()
    try:
        return await asyncio.wrap_future(mapped)
    except asyncio.CancelledError:
        mapped.add_done_callback(partial(_unmap, reader, export.description.pool))
        raise
    except OSError as problem:
        raise AttachRefused(f"the pool cannot be mapped: {problem.strerror}") from None


def _unmap(reader: Reader, pool: int, mapped: concurrent.futures.Future[tuple[Attachment, list[int]]]) -> None:
    if mapped.exception() is None:
        close_all(mapped.result()[1])
        reader.detach(pool)
