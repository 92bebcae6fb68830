"""Where the processes of a deployment meet, and who owns what there.

The identity of a deployment is its name and the user's uid; both ends compute the same folder from it:

    <base>/tensorferry/<start of the name>-<hash of the name>/
        deployment-0.lock     who runs `up`
        encoder-3.lock        who is encoder 3: held with flock for as long as the process lives
        encoder-3.in          its inbox
        encoder-3.pool        where it hands out descriptors of its pool
        tokenizer-0.door      where clients come in
        encoder-3.settings    what it runs with, for those who attach

With `network.bind` the doors, and with `network.inboxes: tcp` the inboxes too, are ports instead of files.

All folders belong to the user alone (0700). The lock is the kernel's: it is free the moment its owner is dead,
however that died. The text in the file only says who that is. Socket files mean nothing without the lock, and
are removed only by the one who holds it. Whoever runs holds a name of the kernel's too (see `claim`), so that no second
one comes beside it where somebody has removed the files.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.channels.addresses import (
    TCP,
    host_and_port,
    tcp_address,
)
from tensorferry.pipeline.channels.socket_file import is_file
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.lock_owner import Owner, has_open, sign, this_process
from tensorferry.pipeline.process.name_claim import Claimed, claimed
from tensorferry.pipeline.process.runtime_path import check_ours, check_shared, folder_of
from tensorferry.pipeline.process.socket_addresses import SocketAddresses

log = structlog.get_logger()

SOCKETS = (".in", ".door", ".pool")
SETTINGS = ".settings"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The folder of one deployment. Computing addresses touches nothing; `prepare` and `own` do."""

    name: str
    directory: Path
    network: SocketAddresses | None = None

    @classmethod
    def of(cls, deployment: Deployment, environ: Mapping[str, str] = os.environ) -> Runtime:
        """The same for every process of a deployment, and its clients, under one user.

        See `folder_of`. Raises DeploymentError when `runtime_dir` or `network` cannot be used.
        """
        return cls(deployment.name, folder_of(deployment, environ), SocketAddresses.of(deployment))

    # --- addresses

    def inbox(self, stage: str, rank: int) -> str:
        """Where a process takes its messages: a ZeroMQ address, to connect to."""
        if self.network is not None and self.network.inboxes:
            return tcp_address(self.network.reachable, self.network.inboxes[stage] + rank)
        return f"ipc://{self._path(stage, rank, '.in')}"

    def front_door(self, rank: int) -> str:
        """Where clients reach a tokenizer: a ZeroMQ address, to connect to."""
        if self.network is not None:
            return tcp_address(self.network.reachable, self.network.door + rank)
        return f"ipc://{self._path('tokenizer', rank, '.door')}"

    def has_door(self, rank: int) -> bool:
        """Whether a tokenizer has opened its front door in the folder; where doors are ports, none is there."""
        return self._path("tokenizer", rank, ".door").exists()

    def listening(self, address: str) -> str:
        """What to bind so that peers can connect to one of these addresses."""
        if self.network is None or not address.startswith(TCP):
            return address
        return tcp_address(self.network.listening, host_and_port(address)[1])

    def broker(self, stage: str, rank: int) -> str:
        """Where a process hands out descriptors of its pool: the path of a UNIX socket."""
        return str(self._path(stage, rank, ".pool"))

    def lock(self, stage: str, rank: int) -> Path:
        """The file that the process holds locked."""
        return self._path(stage, rank, ".lock")

    def settings(self, stage: str, rank: int) -> Path:
        """The file in which the process says what it runs with; see `settings.Settings`."""
        return self._path(stage, rank, SETTINGS)

    def _path(self, stage: str, rank: int, suffix: str) -> Path:
        return self.directory / f"{stage}-{rank}{suffix}"

    # --- ownership

    def prepare(self) -> None:
        """Make the folder, or check that it is ours alone. Both ends do so before they trust an address in it.

        Raises DeploymentError.
        """
        base = self.directory.parent
        try:
            for folder in reversed(base.parents):
                folder.mkdir(0o755, exist_ok=True)
            check_shared(base.parent)
            for folder, closed_to_others in ((base, 0o022), (self.directory, 0o077)):
                try:
                    folder.mkdir(0o700)
                except FileExistsError:
                    check_ours(folder, closed_to_others)
        except OSError as problem:
            raise DeploymentError(f"cannot make the runtime directory {self.directory}: {problem}") from None

    @contextmanager
    def own(self, stage: str, rank: int, config: str = "") -> Iterator[Owner]:
        """Be this process of the deployment, for the length of the block.

        What a dead owner left is taken over. Raises DeploymentError, naming the owner, when one is alive, also where
        somebody has removed its lock file. Leave the block after the last socket of yours is closed: what is still
        there of them, and the settings, is removed.
        """
        with self._held(stage, rank) as descriptor, self._claimed(stage, rank):
            with self._owned(descriptor, stage, rank, config) as owner:
                yield owner

    def keep(self, stage: str, rank: int, held: ExitStack, config: str = "") -> bool:
        """See that others find the lock of this process, which owns it: to be called again and again, within the block.

        A file that somebody has removed is made again, and True returned; `held` gives it back, and must end before the
        block does. One that does not say whose it is, since the disk was full, is signed. Raises
        DeploymentError, OSError.
        """
        path = self.lock(stage, rank)
        if not path.exists():
            descriptor = held.enter_context(self._held(stage, rank))
            held.enter_context(self._owned(descriptor, stage, rank, config))
            return True
        if self.owner(stage, rank) is None and has_open(os.getpid(), path):
            with suppress(OSError):  # the disk is full still
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    sign(descriptor, this_process(config))
                finally:
                    os.close(descriptor)
        return False

    def sweep(self) -> list[str]:
        """Remove what dead owners left; the names of those. A supervisor does so before it starts and after it ends."""
        swept = []
        for path in sorted(self.directory.glob("*.lock")):
            stage, _, rank = path.stem.rpartition("-")
            try:
                with self.own(stage, int(rank)):
                    swept.append(path.stem)
            except (DeploymentError, ValueError):
                continue  # alive, or not ours
        return swept

    def owner(self, stage: str, rank: int) -> Owner | None:
        """Who says to be this process, dead or alive; None: nobody, or one that has not said so yet."""
        try:
            return msgspec.json.decode(self.lock(stage, rank).read_bytes(), type=Owner)
        except (OSError, msgspec.MsgspecError):
            return None

    def is_held(self, stage: str, rank: int) -> bool:
        """Whether somebody is this process now, whoever that is and whatever the file says."""
        try:
            descriptor = os.open(self.lock(stage, rank), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def holders(self, stage: str, rank: int) -> list[int]:
        """The processes of ours that have the lock file open, and so most likely hold it."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        return [pid for pid in pids if pid != os.getpid() and has_open(pid, self.lock(stage, rank))]

    def pidfd(self, stage: str, rank: int) -> int | None:
        """A pidfd, the caller's to close, of whoever is this process now; None: nobody.

        A process that has the lock file open is the one that the file names: its number cannot be another's by then.
        """
        owner = self.owner(stage, rank)
        if owner is None:
            return None
        try:
            pidfd = os.pidfd_open(owner.pid)
        except OSError:
            return None
        if has_open(owner.pid, self.lock(stage, rank)):
            return pidfd
        os.close(pidfd)
        return None

    @contextmanager
    def _held(self, stage: str, rank: int) -> Iterator[int]:
        """Hold the lock file, whose descriptor this is."""
        descriptor, path = self._lock(stage, rank), self.lock(stage, rank)
        try:
            found = os.fstat(descriptor)
            try:
                yield descriptor
            finally:
                if is_file(str(path), found.st_dev, found.st_ino):  # else it was removed, and may be another's by now
                    path.unlink(missing_ok=True)  # while it is locked, so nobody takes a file that then goes
        finally:
            os.close(descriptor)
            with suppress(OSError):  # others are there
                self.directory.rmdir()

    @contextmanager
    def _claimed(self, stage: str, rank: int) -> Iterator[None]:
        """Keep out a second one that finds no lock file, because somebody has removed it."""
        try:
            with claimed(f"{stage}-{rank} {os.path.realpath(self.directory)}"):
                yield
        except Claimed as problem:
            holder, what = problem.holder, "" if stage == "deployment" else f"{stage}-{rank} of "
            remedy = f"kill -TERM {holder.pid}" if holder.pid else "stop it where it was started"
            raise DeploymentError(
                f"{what}deployment {self.name!r} is already running: it is {holder}, whose lock file "
                f"{self.lock(stage, rank)} was removed. It makes that again within timeouts.heartbeat_s; "
                f"to end it: {remedy}"
            ) from None

    @contextmanager
    def _owned(self, descriptor: int, stage: str, rank: int, config: str) -> Iterator[Owner]:
        """Say who the owner is, and remove what a former one has left, and in the end what this one has."""
        owner = this_process(config)
        try:
            sign(descriptor, owner)
        except OSError as problem:  # a full disk: the lock holds all the same, and `keep` signs it later
            log.warning("owner_not_written", lock=str(self.lock(stage, rank)), problem=problem.strerror)
        self._remove_left(stage, rank)
        try:
            yield owner
        finally:
            self._remove_left(stage, rank)

    def _lock(self, stage: str, rank: int) -> int:
        """The descriptor of the lock file, locked, and still the one that others will find."""
        path = self.lock(stage, rank)
        while True:
            self.prepare()
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue  # an owner that left took the empty folder with it, after we had prepared it
            except OSError as problem:
                raise DeploymentError(f"cannot open the lock file {path}: {problem.strerror}") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.stat(path, follow_symlinks=False)
                ours = os.fstat(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                owner = self.owner(stage, rank)
                who = f"it is {owner}" if owner else "its owner is just coming or going; try again"
                what = "" if stage == "deployment" else f"{stage}-{rank} of "
                raise DeploymentError(f"{what}deployment {self.name!r} is already running: {who}") from None
            except FileNotFoundError:
                os.close(descriptor)  # unlinked by its last owner after we had opened it
                continue
            if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
                return descriptor
            os.close(descriptor)

    def _remove_left(self, stage: str, rank: int) -> None:
        """Sockets and settings; nothing else that has such a name."""
        for suffix, kind in (*((suffix, stat.S_IFSOCK) for suffix in SOCKETS), (SETTINGS, stat.S_IFREG)):
            path = self._path(stage, rank, suffix)
            try:
                if stat.S_IFMT(path.lstat().st_mode) == kind:
                    path.unlink()
            except FileNotFoundError:
                continue
