"""How a life begins: what it is told, and its way into `run`."""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from contextlib import suppress
from functools import partial

import msgspec

from lives.consumer import Consumer
from lives.fate import Fate
from lives.faults import plant
from lives.life import Life
from lives.producer import Producer


class Birth(msgspec.Struct, frozen=True, array_like=True):
    """With descriptors: control socket, own mailbox, then the mailboxes of the other side, by rank."""

    role: str
    rank: int
    epoch: int
    seed: int
    folder: str  #: where the producers' brokers listen
    fault: str
    fate: tuple[int, int] | None  #: (lines of the code under test, signal that it then gets)


def be_born(birth: Birth, fds: list[int]) -> None:
    """Live in this process, a fork, and end it."""
    control, mailbox, *others = (socket.socket(fileno=fd) for fd in fds)
    try:
        plant(birth.fault)
        kind: type[Life] = {"producer": Producer, "consumer": Consumer}[birth.role]
        life = kind(birth.rank, birth.epoch, birth.seed, birth.folder, birth.fault, control, mailbox, others)
        life.fate = Fate(*birth.fate, partial(life.report, "at")) if birth.fate is not None else None
        asyncio.run(life.main())
    except BaseException:  # whatever it was: a fork must tell its driver, and never run on as the zygote
        with suppress(OSError):
            control.setblocking(True)
            control.send(msgspec.msgpack.encode(("crashed", traceback.format_exc()[-8000:])))
    os._exit(0)
