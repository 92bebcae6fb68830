"""What ties a stage process to the supervisor that started it, and how others see that tie."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tensorferry.codecs.errors import DeploymentError

ORPHAN_S = 3.0  #: for a process that has lost its supervisor to end by itself, before it is killed with its children
LAST_WORDS_NBYTES = 4096  #: so many go into a pipe at once (PIPE_BUF in pipe(7))
TETHER_VARIABLE = "TENSORFERRY_TETHER"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Tether:
    """What ties a stage process to the supervisor that started it: descriptors it inherited, and what both have read.

    The lifeline is a pipe that only the supervisor can write to. A byte in it, one for each process, says: cancel. Its
    end says that the supervisor is gone, however it went; so does SIGHUP, which the kernel may send a little earlier.
    """

    lifeline: int
    status: int  #: takes a line when the stage is ready, or what keeps it from being
    deployment: str  #: digest of what the supervisor read from the deployment file

    def __str__(self) -> str:
        return f"{self.lifeline}:{self.status}:{self.deployment}"

    @classmethod
    def taken_from(cls, environ: MutableMapping[str, str]) -> Tether | None:
        """The tether in an environment, which no longer has it then: it means nothing to children of ours.

        None for a process that was started by hand. Raises DeploymentError for one that does not hold.
        """
        text = environ.pop(TETHER_VARIABLE, None)
        if text is None:
            return None
        try:
            lifeline, status, deployment = text.split(":")
            tether = cls(int(lifeline), int(status), deployment)
            os.set_inheritable(tether.lifeline, False)
            os.set_inheritable(tether.status, False)
        except (ValueError, OSError):
            problem = f"{TETHER_VARIABLE}={text} is not from a supervisor of this process; unset it"
            raise DeploymentError(problem) from None
        return tether

    def hold(self) -> None:
        """Have the kernel send SIGHUP when the supervisor dies, which ends a process that has no handler for it yet.

        Call it before anything slow. It speaks of the thread that started us, which is the one with the
        supervisor's event loop; where that ends early, the supervisor has ended its stages already.
        """
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored, in children too
        signal_when_parent_dies(signal.SIGHUP)
        if self.cut:  # before that call
            os.kill(os.getpid(), signal.SIGHUP)

    def announce(self) -> None:
        with suppress(OSError):  # the supervisor has gone; the lifeline says so too
            os.write(self.status, b"ready\n")
            os.close(self.status)

    def explain(self, problem: str) -> None:
        """Say why the stage ends before it is ready, to be repeated where its supervisor says that it has."""
        with suppress(OSError):
            os.write(self.status, problem.encode(errors="replace")[:LAST_WORDS_NBYTES])

    @property
    def cut(self) -> bool:
        """Whether the supervisor is gone. Takes nothing out of the pipe: what is in it may be for others."""
        return bool(_hang_up(self.lifeline).poll(0))

    def watch(self, told: Callable[[], None], lost: Callable[[], None]) -> None:
        """From a thread of its own, call `told` when we are to cancel, and `lost` when the supervisor is gone; ORPHAN_S
        later everything is killed.

        A thread, so that an event loop that is kept busy cannot make an orphan.
        """
        threading.Thread(target=self._watch, args=(told, lost), name="lifeline", daemon=True).start()

    def _watch(self, told: Callable[[], None], lost: Callable[[], None]) -> None:
        signal_when_parent_dies(signal.SIGCONT)  # beside the SIGHUP: one that is stopped would not hear of it
        if os.read(self.lifeline, 1):
            told()
            _hang_up(self.lifeline).poll()
        lost()
        threading.Event().wait(ORPHAN_S)
        kill_group()


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, or by a debugger. Source: proc_pid_stat(5)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    return False


def supervisor_of(pid: int) -> int | None:
    """The living supervisor that has started a stage, and would start it again; None: it was started by hand, or its
    supervisor is gone, and it goes too. pid: a process of ours.

    Its environment at its start had the tether, whose lifeline only the supervisor has besides. Source: proc(5).
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        tether = next((text for text in environ if text.startswith(f"{TETHER_VARIABLE}=".encode())), None)
        if tether is None:
            return None
        lifeline = os.readlink(f"/proc/{pid}/fd/{tether.decode().partition('=')[2].partition(':')[0]}")
        descriptors = os.listdir(f"/proc/{parent}/fd")
    except (OSError, ValueError):  # it has ended, or nearly so
        return None
    for name in descriptors:
        with suppress(OSError):
            if os.readlink(f"/proc/{parent}/fd/{name}") == lifeline:
                return parent
    return None


def kill_group() -> None:
    """Kill this process, and with it, where it leads a process group, everything it has started."""
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Have the kernel send this process a signal then; each of its threads can ask for one of its own.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _hang_up(pipe: int) -> select.poll:
    """Polls for the moment when nobody can write to a pipe any more."""
    poll = select.poll()
    poll.register(pipe, 0)  # POLLHUP need not be asked for
    return poll
