"""The facts of a machine: `transport.decide` decides by them, and `doctor` prints them.

Plain values, gathered by `probe.gather`. Where a capability matters, a fact is the outcome of a trial and not a flag:
a GPU without an IMEX channel says that it supports FABRIC handles, and then refuses to make one.
"""

from __future__ import annotations

import msgspec


class Trial(msgspec.Struct, frozen=True):
    """The result of trying something: how far it came, and why not further."""

    ok: bool
    step: str = ""  #: what failed: "create", "export", "pass", "import", ...; "" where nothing did
    problem: str = ""  #: what was said: "cuMemCreate: CUDA_ERROR_NOT_PERMITTED"

    def __str__(self) -> str:
        return "works" if self.ok else f"{self.step}: {self.problem}" if self.step else self.problem


UNTRIED = Trial(False, "", "not tried")


class HostFacts(msgspec.Struct, frozen=True):
    """The node, and the container around this process. Sizes in bytes; None: unlimited."""

    kernel: str  #: as `uname -r` prints it
    memfd: Trial  #: a sealed memfd made, passed over a UNIX socket, mapped read-only; a pidfd of this process
    shm_nbytes: int | None  #: size of /dev/shm; None: there is none
    available_nbytes: int
    memlock_nbytes: int | None
    open_files: int | None  #: descriptors this process may have
    seccomp: int  #: 0 off, 1 strict, 2 filter. Source: proc(5), Seccomp
    nested_pids: bool  #: in a PID namespace of its own
    imex: bool  #: /dev/nvidia-caps-imex-channels/channel0 is there and may be opened
    mps: bool  #: a CUDA MPS daemon answers, or is meant to, in this environment
    visible: tuple[str, ...] | None = None  #: what CUDA_VISIBLE_DEVICES names; None: every GPU
    visible_problem: str = ""  #: why that variable cannot be read
    max_connections: str = ""  #: CUDA_DEVICE_MAX_CONNECTIONS, as it is set
    module_loading: str = ""  #: CUDA_MODULE_LOADING, as it is set

    @property
    def wsl(self) -> bool:
        """Whether this is WSL2. Source: its kernels are called 5.15.90.1-microsoft-standard-WSL2."""
        return "microsoft" in self.kernel.lower()


class Gpu(msgspec.Struct, frozen=True):
    """One device as CUDA shows it to a process with this environment."""

    name: str
    uuid: str  #: GPU-... or MIG-..., as nvidia-smi -L prints it
    mig: bool = False
    vmm: bool = False  #: flag: virtual memory management
    posix_fd: bool = False  #: flag: POSIX descriptors as handles
    fabric: bool = False  #: flag: FABRIC handles; true on GPUs that then refuse them
    mnnvl: bool = False  #: belongs to a multi-node NVLink domain (GB200 or GB300 class)
    mps: bool = False  #: contexts are shared through MPS
    peers: tuple[int, ...] = ()  #: devices whose memory it says it can reach


class CudaFacts(msgspec.Struct, frozen=True):
    """CUDA in a process of its own. The trials ran on device 0, between two processes."""

    problem: str = ""  #: why there is no CUDA here; the rest says nothing then
    missing: bool = False  #: that problem is the absence of a driver, which on many machines is no fault
    driver: int = 0  #: version of the driver API: 13000 is 13.0
    gpus: tuple[Gpu, ...] = ()
    words: Trial = UNTRIED  #: a sealed memfd page registered, a word written by a stream, seen by the CPU
    ipc: Trial = UNTRIED  #: cudaIpc: allocated, exported, opened elsewhere, right bytes read
    peer: Trial | None = None  #: the same, opened under device 1; None: there is only one device
    posix_fd: Trial = UNTRIED  #: a VMM chunk created, exported as a descriptor, imported, mapped, right bytes read
    fabric: Trial = UNTRIED  #: the same with a FABRIC handle


class Facts(msgspec.Struct, frozen=True):
    """All facts. cuda: None where it was not probed; a decision that needs it takes this for "no CUDA"."""

    host: HostFacts
    cuda: CudaFacts | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether CUDA works here and shows a device."""
        return self.cuda is not None and not self.cuda.problem and bool(self.cuda.gpus)
