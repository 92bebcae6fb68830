"""What `ec_connector_extra_config` may say: decoded once, strictly."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tensorferry.codecs.errors import DeploymentError
from tensorferry.connectors.ec.messages import LONGEST_LEFT_MS
from tensorferry.pipeline.channels.addresses import PATH_NBYTES, check_address

LONGEST_NAME_NBYTES = 48  #: of a socket's file in the folder
PRODUCER = ".producer"  #: how the files of producers' sockets end, by which consumers find them
ENGINE = ".engine"  #: and those at which schedulers listen for their ranks

Seconds = Annotated[float, Meta(gt=0, le=LONGEST_LEFT_MS / 1000)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See the module. A producer reads `memory` to `listen`, a consumer `producers` to `on_missing`, both the rest."""

    folder: str  #: absolute, of this user alone; engines that name the same folder find each other
    model: Annotated[str, Meta(max_length=1024)] = ""  #: what the model is called to peers; empty: what vLLM calls it
    keys: str = ""  #: a folder of `tensorferry keys new`; needed for TCP beyond loopback

    memory: Literal["shm", "cuda_ipc", "cuda_vmm", "none"] = "shm"  #: of the pool; `none`: everything goes inline
    budget_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  #: of the pool; seven eighths of it keep outputs
    slots: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    inline_below_kb: Annotated[int, Meta(ge=0, le=1 << 20)] = 32  #: smaller outputs go inline
    keep_s: Seconds = 60.0  #: how long an output is kept that nobody asks for
    listen: str = ""  #: for consumers on other machines: tcp://HOST:PORT

    producers: tuple[str, ...] = ()  #: on other machines: tcp://HOST:PORT of each
    patience_s: Seconds = 30.0  #: how long a request waits for an output
    scan_s: Seconds = 1.0  #: how often the folder is looked at for new producers
    on_missing: Literal["error", "encode"] = (
        "error"  #: `encode`: by the engine's own tower, if the request has the image
    )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """Raises DeploymentError, which names the key and what may stand there."""
        try:
            settings = msgspec.convert(given, cls)
        except msgspec.ValidationError as problem:
            known = ", ".join(cls.__struct_fields__)
            raise DeploymentError(f"ec_connector_extra_config: {problem}; its keys are {known}") from None
        folder = os.fsencode(settings.folder)
        if not os.path.isabs(folder) or len(folder) > PATH_NBYTES - LONGEST_NAME_NBYTES:
            raise DeploymentError(
                f"ec_connector_extra_config: folder: {settings.folder!a} is no absolute path of at most "
                f"{PATH_NBYTES - LONGEST_NAME_NBYTES} bytes, which leave room for the names of sockets"
            )
        if settings.listen:
            check_address(settings.listen, bound=True, curve=bool(settings.keys))
        for address in settings.producers:
            check_address(address)
        return settings

    @property
    def patience_ms(self) -> int:
        return max(1, round(self.patience_s * 1000))

    def prepare(self) -> Path:
        """The folder, made if it is not there. Raises DeploymentError unless it is of this user alone: whoever can
        enter it can read the pools and send outputs."""
        folder = Path(self.folder)
        try:
            folder.mkdir(0o700, exist_ok=True)
            found, above = folder.lstat(), folder.parent.stat()
        except OSError as problem:
            raise _bad_folder(folder, f"cannot be made: {problem.strerror}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise _bad_folder(folder, f"is no folder of user {os.geteuid()}")
        if found.st_mode & 0o077:
            raise _bad_folder(folder, f"is open to others (mode {stat.S_IMODE(found.st_mode):04o}); chmod 700 it")
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            raise _bad_folder(folder, f"can be replaced by anybody, as {folder.parent} has no sticky bit")
        return folder


def _bad_folder(folder: Path, problem: str) -> DeploymentError:
    return DeploymentError(f"ec_connector_extra_config: folder: {folder} {problem}")
