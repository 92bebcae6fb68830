"""A consumer as its pool has it: its ack page, its process descriptor, and the line for its chunks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from fcntl import F_GETFD, fcntl
from typing import NamedTuple, Self

from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.memory.cuda_driver import HandleKind
from tensorferry.codecs.messages import PoolDescription
from tensorferry.codecs.pool.control import AckPage
from tensorferry.codecs.pool.elastic.descriptor_line import Sender
from tensorferry.codecs.pool.elastic.mail import ChunkMail
from tensorferry.codecs.pool.export import Attachment, positions_of
from tensorferry.codecs.system.descriptors import close_all
from tensorferry.codecs.system.pidfd import check_pidfd, is_dead


class Consumer(NamedTuple):
    """Owns all its parts, until `close`."""

    epoch: int
    page: AckPage | None  #: None: it acknowledges by message
    pidfd: int | None  #: None: it is on another node
    line: Sender | ChunkMail | None  #: of an elastic pool

    @classmethod
    def local(cls, description: PoolDescription, attachment: Attachment, fds: Sequence[int]) -> Self:
        """A consumer that shares pages. Takes over its descriptors (ack page, process, and for an elastic pool the
        line), also where it raises AttachRefused."""
        fds, needed = list(fds), 3 if description.chunk_nbytes else 2
        with ExitStack() as undo:
            undo.callback(close_all, fds)  # the list as it is then
            if len(fds) != needed or attachment.pool != description.pool:
                raise _refused(description, attachment, fds, f"{needed}")
            check_pidfd(fds[1])
            positions = positions_of(description)
            page = AckPage.attach(fds[0], description.slots, attachment.pool, attachment.consumer, positions)
            undo.callback(page.close)
            line = Sender(fds.pop()) if description.chunk_nbytes else None
            undo.pop_all()
        os.close(fds[0])
        return cls(attachment.consumer, page, fds[1], line)

    @classmethod
    def by_mail(
        cls, description: PoolDescription, kind: HandleKind, attachment: Attachment, fds: Sequence[int]
    ) -> Self:
        """A consumer that shares none. Takes over its descriptors (process and line for chunks by descriptor; for
        FABRIC handles its process where it is on this node), also where it raises AttachRefused."""
        fds, needed = list(fds), (2,) if kind == "posix_fd" else (0, 1)
        with ExitStack() as undo:
            undo.callback(close_all, fds)  # the list as it is then
            if len(fds) not in needed or attachment.pool != description.pool:
                raise _refused(description, attachment, fds, " or ".join(map(str, needed)))
            if fds:
                check_pidfd(fds[0])
            line = Sender(fds.pop()) if kind == "posix_fd" else None
            undo.pop_all()
        mail = ChunkMail(description.pool, attachment.consumer, line)
        return cls(attachment.consumer, None, fds[0] if fds else None, mail)

    @property
    def is_dead(self) -> bool:
        """Whether its process is proven dead. This is never known of a process on another node."""
        return self.pidfd is not None and is_dead(self.pidfd)

    def close(self) -> None:
        with ExitStack() as undo:
            if self.page is not None:
                undo.callback(self.page.close)
            if self.pidfd is not None:
                undo.callback(os.close, self.pidfd)
            if self.line is not None:
                undo.callback(self.line.close)


def check_taken(what: object, kind: type, fds: Sequence[int]) -> None:
    """Raise TypeError unless `what` is of a kind, and AttachRefused unless all descriptors that came with it, which are
    taken over, are open; then all that are have been closed."""
    shut = [fd for fd in fds if not _is_open(fd)]
    if shut or not isinstance(what, kind):
        close_all([fd for fd in fds if fd not in shut])
        if not isinstance(what, kind):
            raise TypeError(f"{what!r} is no {kind.__name__}")
        raise AttachRefused(f"descriptor {shut[0]} is not open")


def _is_open(fd: int) -> bool:
    try:
        fcntl(fd, F_GETFD)
    except (OSError, ValueError):  # ValueError: below 0
        return False
    return True


def _refused(description: PoolDescription, attachment: Attachment, fds: Sequence[int], needed: str) -> AttachRefused:
    return AttachRefused(
        f"{len(fds)} descriptors for pool {attachment.pool}; {needed} for pool {description.pool} are needed"
    )
