"""Advice on a machine before a deployment, as a pure function of its facts, for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tensorferry.codecs.machine.facts import CudaFacts, Facts, HostFacts

MIB = 1 << 20
OPEN_FILES = 4096  #: enough for 64 processes that all know each other
SHM_NBYTES = 1 << 30
CONNECTIONS = 8  #: CUDA's default number of hardware queues, and how many held streams stop a process (H200)
SECCOMP = {0: "off", 1: "strict", 2: "filter"}


class Check(msgspec.Struct, frozen=True):
    """The result of one check. advice: what to do where it is not ok, or else what it means."""

    name: str
    ok: bool | None  #: None: it does not work or is not there, and nothing here needs it
    found: str
    advice: str = ""


def checkup(facts: Facts) -> tuple[Check, ...]:
    """Every check that applies here, those of node and container first."""
    in_domain = facts.cuda is not None and any(gpu.mnnvl for gpu in facts.cuda.gpus)
    return (*_host(facts.host, in_domain), _memlock(facts), *_environment(facts), *_cuda(facts, in_domain))


def _host(host: HostFacts, in_domain: bool) -> Iterator[Check]:
    yield Check(
        "kernel", not host.wsl, host.kernel, "WSL2: share no GPU memory between processes here" if host.wsl else ""
    )
    yield Check(
        "sealed memory",
        host.memfd.ok,
        str(host.memfd),
        "" if host.memfd.ok else "allow memfd_create, pidfd_open and sendmsg (seccomp), and leave some memory",
    )
    yield Check("available memory", True, _size(host.available_nbytes), "what all host pools together must fit in")
    yield Check(
        "/dev/shm",  # noqa: S108 - its name, not a file in it
        host.shm_nbytes is not None and host.shm_nbytes >= SHM_NBYTES,
        "not mounted" if host.shm_nbytes is None else _size(host.shm_nbytes),
        "tensorferry does not use it, but engines do: --shm-size=1g or more",
    )
    yield Check(
        "open files",
        host.open_files is None or host.open_files >= OPEN_FILES,
        "unlimited" if host.open_files is None else f"{host.open_files} descriptors",
        f"a large deployment needs more than 1024: ulimit -n {OPEN_FILES}, or --ulimit nofile={OPEN_FILES}",
    )
    yield Check(
        "seccomp",
        True,
        SECCOMP.get(host.seccomp, str(host.seccomp)),
        "a filter may forbid system calls; those that matter were tried (sealed memory)" if host.seccomp else "",
    )
    yield Check(
        "process ids",
        True,
        "a namespace of its own" if host.nested_pids else "those of the node",
        "all stages must share it (docker --pid, Kubernetes shareProcessNamespace)" if host.nested_pids else "",
    )
    yield Check(
        "IMEX channel",
        _needed(host.imex, in_domain),
        "channel0 is mounted" if host.imex else "none",
        "cuda_vmm across nodes needs it: mount /dev/nvidia-caps-imex-channels/channel0",
    )


def _memlock(facts: Facts) -> Check:
    limit = facts.host.memlock_nbytes
    if limit is None:
        return Check("memlock", True, "unlimited")
    if facts.cuda is None or not facts.has_gpu:
        return Check("memlock", None, _size(limit), "matters where host memory is registered with CUDA")
    counted = facts.cuda.words.step == "register"
    advice = "host memory cannot be registered with CUDA: --ulimit memlock=-1" if counted else "this driver ignores it"
    return Check("memlock", not counted, _size(limit), advice)


def _environment(facts: Facts) -> Iterator[Check]:
    host = facts.host
    if host.visible_problem:
        yield Check("CUDA_VISIBLE_DEVICES", False, host.visible_problem, "name each GPU once, as nvidia-smi -L does")
    elif host.visible is not None:
        shown = len(facts.cuda.gpus) if facts.cuda is not None else 0
        yield Check(
            "CUDA_VISIBLE_DEVICES",
            shown == len(host.visible) or not facts.has_gpu,
            f"{','.join(host.visible) or 'no GPU'} ({shown} found)",
            "a GPU that is not there hides itself and all that follow",
        )
    few = host.max_connections.isdigit() and int(host.max_connections) < CONNECTIONS
    yield Check(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        not few,
        host.max_connections or "not set",
        f"with so few, a stream of the engine's that waits can stop its process: {CONNECTIONS} or more" if few else "",
    )
    yield Check(
        "CUDA_MODULE_LOADING",
        True,
        host.module_loading or "not set",
        "" if host.module_loading.upper() == "EAGER" else "LAZY: the first launch of a kernel waits for other streams",
    )


def _cuda(facts: Facts, in_domain: bool) -> Iterator[Check]:
    cuda = facts.cuda
    if cuda is None:
        return
    if cuda.problem:
        yield Check("CUDA driver", False, cuda.problem, "install it, or start the container with --gpus all")
        return
    yield Check("CUDA driver", True, f"API {cuda.driver // 1000}.{cuda.driver % 1000 // 10}, {len(cuda.gpus)} GPUs")
    for index, gpu in enumerate(cuda.gpus):
        flags = {"VMM": gpu.vmm, "POSIX FD": gpu.posix_fd, "FABRIC": gpu.fabric, "MNNVL": gpu.mnnvl, "MIG": gpu.mig}
        said = ", ".join(name for name, flag in flags.items() if flag) or "none of them"
        yield Check(f"GPU {index}", True, f"{gpu.name} {gpu.uuid}", f"flags: {said}")
        if len(cuda.gpus) > 1:
            yield Check(
                f"GPU {index} peers",
                len(gpu.peers) == len(cuda.gpus) - 1,
                ", ".join(map(str, gpu.peers)) or "none",
                "what is out of reach goes through host memory; nvidia-smi topo -p2p r shows why",
            )
    yield from _trials(cuda, in_domain)
    mps = facts.host.mps or any(gpu.mps for gpu in cuda.gpus)
    yield Check(
        "MPS",
        not mps,
        "on" if mps else "off",
        "a client's death proves nothing of its GPU work: what it may still read stays in quarantine" if mps else "",
    )


def _trials(cuda: CudaFacts, in_domain: bool) -> Iterator[Check]:
    for name, trial, needed in (
        ("stream words", cuda.words, True),
        ("CUDA IPC", cuda.ipc, True),
        ("CUDA IPC to GPU 1", cuda.peer, True),
        ("POSIX FD handles", cuda.posix_fd, True),
        ("FABRIC handles", cuda.fabric, in_domain),
    ):
        if trial is not None:
            unneeded = "" if needed else "; needed only between nodes of an NVLink domain, so not here"
            advice = "" if trial.ok else f"tried between two processes, not read from flags{unneeded}"
            yield Check(name, _needed(trial.ok, needed), str(trial), advice)


def _needed(works: bool, needed: bool) -> bool | None:
    return works if works or needed else None


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB"
