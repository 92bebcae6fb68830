"""Gathers the facts of this machine by trying things; leaves no memory, descriptor or CUDA context behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from tensorferry.codecs.machine.facts import CudaFacts, Facts, HostFacts, Trial
from tensorferry.codecs.machine.trials import Failed, step, tried
from tensorferry.codecs.machine.visible_devices import VARIABLE, BadVisibleDevices, visible_devices
from tensorferry.codecs.memory.free_memory import available_nbytes
from tensorferry.codecs.memory.host import HostSegment

PROBE_S = 60.0  #: for all of CUDA's trials; half a second is usual, contexts on many GPUs take longer
IMEX_CHANNEL = "dev/nvidia-caps-imex-channels/channel0"
FIRST_PID_NAMESPACE = "pid:[4026531836]"  #: Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO
MPS_PIPE = "tmp/nvidia-mps"  #: where a CUDA MPS daemon listens unless CUDA_MPS_PIPE_DIRECTORY says otherwise


def gather(environ: Mapping[str, str], *, cuda: bool = True, root: Path = Path("/")) -> Facts:
    """The facts of this machine for a process with this environment.

    cuda: whether to look at CUDA too, in a child process; takes half a second. root: where /proc, /dev and /tmp are.
    """
    return Facts(host_facts(environ, root), cuda_facts(environ) if cuda else None)


# --- the host


def host_facts(environ: Mapping[str, str], root: Path = Path("/")) -> HostFacts:
    """The facts of the node and the container."""
    status = _status(root)
    visible, visible_problem = None, ""
    try:
        visible = visible_devices(environ.get(VARIABLE))
    except BadVisibleDevices as problem:
        visible_problem = str(problem)
    mps = environ.get("CUDA_MPS_PIPE_DIRECTORY", str(root / MPS_PIPE))
    return HostFacts(
        kernel=(root / "proc/sys/kernel/osrelease").read_text(encoding="ascii").strip(),
        memfd=memfd_trial(),
        shm_nbytes=_size_of(root / "dev/shm"),
        available_nbytes=available_nbytes(root),
        memlock_nbytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        seccomp=int(status.get("Seccomp", "0")),
        nested_pids=os.readlink(root / "proc/self/ns/pid") != FIRST_PID_NAMESPACE,
        imex=os.access(root / IMEX_CHANNEL, os.R_OK | os.W_OK),
        mps=os.path.exists(os.path.join(mps, "control")),
        visible=visible,
        visible_problem=visible_problem,
        max_connections=environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        module_loading=environ.get("CUDA_MODULE_LOADING", ""),
    )


def memfd_trial() -> Trial:
    """Make a sealed memfd, pass it over a UNIX socket, map what arrives, and read what was written."""
    return tried(_pass_memfd)


def _pass_memfd() -> None:
    nbytes = os.sysconf("SC_PAGESIZE")
    with ExitStack() as undo:
        with step("create"):
            made = HostSegment.create(nbytes, "tensorferry-probe")
            undo.callback(made.close)
            made.data[:4] = 1, 2, 3, 4
        with step("pidfd"):
            os.close(os.pidfd_open(os.getpid()))
        with step("pass"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(ours)
            undo.enter_context(theirs)
            socket.send_fds(ours, [b"memfd"], [made.fd])
            _, fds, _, _ = socket.recv_fds(theirs, 16, 1, socket.MSG_CMSG_CLOEXEC)
            if not fds:
                raise Failed("pass", "the descriptor did not arrive")
            undo.callback(os.close, fds[0])
        with step("map"):
            mapped = HostSegment.attach(fds[0], nbytes)
            undo.callback(mapped.close)
        if bytes(mapped.data[:4]) != b"\1\2\3\4":
            raise Failed("read", "other bytes than were written")


def _status(root: Path) -> dict[str, str]:
    lines = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _size_of(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


# --- CUDA


def cuda_facts(environ: Mapping[str, str], timeout_s: float = PROBE_S) -> CudaFacts:
    """The facts of CUDA, tried by a child process: this process never loads it.

    A driver that hangs or crashes is a fact too.
    """
    command = [sys.executable, "-m", "tensorferry.codecs.machine.cuda_probe"]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
        )
    except OSError as problem:
        return CudaFacts(f"the probe cannot be started: {problem.strerror}")
    with child:
        try:
            found, said = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()  # and its own child goes with it
            return CudaFacts(f"the driver did not answer within {timeout_s:g} s")
    if child.returncode:
        last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return CudaFacts(f"the probe {_how(child.returncode)}{': ' if last else ''}{last[:200]}")
    return msgspec.json.decode(found, type=CudaFacts)


def _how(status: int) -> str:
    names = {number.value: number.name for number in signal.Signals}
    return f"exited with status {status}" if status > 0 else f"was killed by {names.get(-status, -status)}"
