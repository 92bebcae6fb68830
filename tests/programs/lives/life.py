"""What a producer and a consumer share: a control socket, a mailbox, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import msgspec

from lives import mail
from lives.fate import Fate
from tensorferry.codecs.messages import Origin


class Life(ABC):
    """One life of one process. The driver's command `x` calls the method `do_x`."""

    role: str
    fate: Fate | None = None

    def __init__(
        self,
        rank: int,
        epoch: int,
        seed: int,
        folder: str,
        fault: str,
        control: socket.socket,
        mailbox: socket.socket,
        others: list[socket.socket],
    ) -> None:
        self.origin = Origin(self.role, rank, epoch)
        self.epoch, self.folder, self.fault = epoch, folder, fault
        self.rng = random.Random(seed)
        self.others = others
        self._control, self._mailbox = control, mailbox
        self._leaving = asyncio.Event()

    async def main(self) -> None:
        for one in (self._control, self._mailbox, *self.others):
            one.setblocking(False)
        loop = asyncio.get_running_loop()
        before = belongings()
        loop.add_reader(self._control, self._obey)
        loop.add_reader(self._mailbox, self._empty_mailbox)
        if self.fate is not None:
            self.fate.arm()
        await self.live()
        self.report("left", before, belongings())
        while self._control.recv(1 << 16):  # until the driver hangs up
            pass

    @abstractmethod
    async def live(self) -> None:
        """Everything, until `self.leaving()` returns; then nothing is left."""

    async def leaving(self) -> None:
        await self._leaving.wait()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._mailbox)
        loop.remove_reader(self._control)
        self._control.setblocking(True)

    @abstractmethod
    def receive(self, note: mail.Any) -> None:
        """Take what came by mail."""

    def report(self, *what: Any) -> None:
        """Tell the driver. What it need not know (that we are busy) is dropped where it does not keep up."""
        try:
            self._control.send(msgspec.msgpack.encode(what))
        except BlockingIOError:
            assert what[0] == "tick", what

    def post(self, rank: int, note: mail.Any) -> None:
        """Put a note into another's mailbox. Raises BlockingIOError when that is full: nothing was sent."""
        self.others[rank].send(mail.encode(note))

    def mail_waits(self) -> bool:
        try:
            return bool(self._mailbox.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False

    def do_disarm(self) -> None:
        if self.fate is not None:
            self.fate.disarm()

    def do_leave(self) -> None:
        self._leaving.set()

    def _empty_mailbox(self) -> None:
        for _ in range(4):
            try:
                data = self._mailbox.recv(1 << 20)
            except BlockingIOError:
                return
            self.receive(mail.decode(data))

    def _obey(self) -> None:
        data = self._control.recv(1 << 16)
        if not data:
            os._exit(1)  # the driver has gone
        command, *arguments = msgspec.msgpack.decode(data)
        self.report("answer", getattr(self, f"do_{command}")(*arguments))


def belongings() -> tuple[int, int]:
    """(descriptors, memfd mappings) of this process."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:")
