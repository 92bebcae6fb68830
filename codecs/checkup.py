"""What else about a machine is worth knowing before a deployment: a pure reading of its facts, for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tensorferry.codecs.facts import Facts, Trial

MIB = 1 << 20
OPEN_FILES = 4096  #: enough for 64 processes that each know the others
SHM_NBYTES = 1 << 30
SECCOMP = ("off", "strict", "filter")


class Check(msgspec.Struct, frozen=True):
    """One thing looked at. remedy: what to do where it is not ok, or what it means."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def checkup(facts: Facts) -> tuple[Check, ...]:
    """Every check that applies here, those of the container first."""
    return (*_host(facts), *_cuda(facts))


def _host(facts: Facts) -> Iterator[Check]:
    host = facts.host
    yield Check("kernel", not host.wsl, host.kernel, "WSL2 does not share GPU memory reliably" if host.wsl else "")
    yield Check("sealed memory", host.memfd.ok, str(host.memfd), "allow memfd_create and pidfd_open (seccomp)")
    yield Check("available memory", True, _size(host.available_nbytes))
    small = (host.shm_nbytes or 0) < SHM_NBYTES
    found = "not mounted" if host.shm_nbytes is None else _size(host.shm_nbytes)
    yield Check(
        "/dev/shm", not small, found, "tensorferry does not use it, but engines do: start the container with --shm-size"
    )
    low = host.memlock_nbytes is not None and host.memlock_nbytes < 64 * MIB
    found = "unlimited" if host.memlock_nbytes is None else _size(host.memlock_nbytes)
    yield Check("memlock", not low, found, "registering host pools with CUDA may need more: --ulimit memlock=-1")
    few = host.open_files is not None and host.open_files < OPEN_FILES
    found = "unlimited" if host.open_files is None else f"{host.open_files} descriptors"
    yield Check(
        "open files", not few, found, f"a large deployment needs more: ulimit -n {OPEN_FILES}, or --ulimit nofile"
    )
    yield Check("seccomp", True, SECCOMP[host.seccomp] if host.seccomp < len(SECCOMP) else str(host.seccomp))
    nested = "own namespace" if host.nested_pids else "the node's"
    yield Check("process ids", True, nested, "descriptors go over sockets, so this is fine" if host.nested_pids else "")
    channel = "channel0 is mounted" if host.imex else "no channel"
    remedy = "needed by cuda_vmm across nodes alone: mount /dev/nvidia-caps-imex-channels/channel0"
    yield Check("IMEX", host.imex or not _in_domain(facts), channel, remedy)


def _cuda(facts: Facts) -> Iterator[Check]:
    host, cuda = facts.host, facts.cuda
    if host.visible_problem:
        yield Check("CUDA_VISIBLE_DEVICES", False, host.visible_problem, "name each GPU once, as nvidia-smi -L does")
    elif host.visible is not None:
        named = ",".join(host.visible) or "no GPU"
        seen = len(cuda.gpus) if facts.has_gpu and cuda is not None else 0
        yield Check(
            "CUDA_VISIBLE_DEVICES",
            seen == len(host.visible) or not facts.has_gpu,
            f"{named}; CUDA shows {seen}",
            "an index or UUID that is not there hides itself and what follows",
        )
    if cuda is None:
        return
    if cuda.problem:
        yield Check("CUDA driver", False, cuda.problem, "install it, or start the container with --gpus all")
        return
    yield Check("CUDA driver", True, f"API {cuda.driver // 1000}.{cuda.driver % 1000 // 10}")
    for index, gpu in enumerate(cuda.gpus):
        flags = {"VMM": gpu.vmm, "POSIX FD": gpu.posix_fd, "FABRIC": gpu.fabric, "MNNVL": gpu.mnnvl, "MIG": gpu.mig}
        said = ", ".join(name for name, flag in flags.items() if flag) or "nothing"
        yield Check(f"GPU {index}", True, f"{gpu.name} {gpu.uuid}: says {said}")
        alone = len(cuda.gpus) > 1 and len(gpu.peers) < len(cuda.gpus) - 1
        if len(cuda.gpus) > 1:
            reach = ",".join(map(str, gpu.peers)) or "no other GPU"
            remedy = "features for a GPU out of reach go through host memory; see nvidia-smi topo -p2p r"
            yield Check(f"GPU {index} peers", not alone, f"reaches {reach}", remedy)
    trials: list[tuple[str, Trial | None]] = [
        ("stream words", cuda.words),
        ("CUDA IPC", cuda.ipc),
        ("CUDA IPC to GPU 1", cuda.peer),
        ("POSIX FD handles", cuda.posix_fd),
        ("FABRIC handles", cuda.fabric),
    ]
    for name, trial in trials:
        if trial is not None:
            needed = name != "FABRIC handles" or _in_domain(facts)
            remedy = "" if trial.ok else "tried for real between two processes, whatever the flags say"
            yield Check(name, trial.ok or not needed, str(trial), remedy)
    mps = host.mps or any(gpu.mps for gpu in cuda.gpus)
    yield Check(
        "MPS",
        not mps,
        "on" if mps else "off",
        "the death of a client proves nothing about its GPU work, so its leases stay in quarantine" if mps else "",
    )
    connections = host.max_connections
    yield Check(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        not connections or (connections.isdigit() and int(connections) >= 8),
        connections or "not set (8)",
        "with few connections one held stream stops its whole process; tensorferry holds none, but leave it at 8 or more",
    )
    loading = host.module_loading.upper()
    yield Check(
        "CUDA_MODULE_LOADING",
        True,
        host.module_loading or "not set (LAZY)",
        ""
        if loading == "EAGER"
        else "the first launch of a kernel loads it, and waits for whatever its process has queued",
    )


def _in_domain(facts: Facts) -> bool:
    return facts.cuda is not None and any(gpu.mnnvl for gpu in facts.cuda.gpus)


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB"
