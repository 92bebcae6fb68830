"""Which transport a deployment uses: a pure function of what it asks for and of what its machine can do.

`auto` walks down a ladder and says of every rung why it was refused; an explicit choice is taken or is an error, and
never something less (promises P1-P4, P7; docs/transports.md explains the policy to users).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Literal

import msgspec

from tensorferry.codecs.errors import UNPLACED, ConfigError
from tensorferry.codecs.machine.facts import CudaFacts, Facts

Transport = Literal["cpu", "shm", "cuda_ipc", "cuda_vmm"]
TRANSPORTS: tuple[Transport, ...] = ("cpu", "shm", "cuda_ipc", "cuda_vmm")
GPU_TRANSPORTS = frozenset({"cuda_ipc", "cuda_vmm"})

_ON_GPU = (
    "for tensors in GPU memory write cuda_ipc, or cuda_vmm, whose pools grow and shrink; auto decides by the machine"
)
_FAR = "tensors travel within one machine: write cuda_ipc or cuda_vmm for GPU memory, shm for host memory, or cpu"
_IN_HOST = "for shared host memory write shm"
_INLINE = "to send tensors within the messages write cpu"
#: Names of transports elsewhere, without dashes and underscores -> the name to write here.
TRANSPORTS_MEANT: Mapping[str, str] = {
    **dict.fromkeys(("gpu", "cuda", "gpumemory", "device", "vram", "hbm", "nccl", "nvlink", "p2p"), _ON_GPU),
    **dict.fromkeys(("ipc", "gpuipc"), "write cuda_ipc for GPU memory, shm for host memory"),
    **dict.fromkeys(("vmm", "fabric", "elastic", "cumem"), "write cuda_vmm"),
    **dict.fromkeys(("rdma", "gdr", "ib", "infiniband", "roce", "ucx", "nixl", "mooncake", "efa"), _FAR),
    **dict.fromkeys(("sharedmemory", "shmem", "memfd", "posix", "mmap", "host", "hostmemory"), _IN_HOST),
    **dict.fromkeys(("inline", "message", "messages", "zmq", "zeromq", "tcp", "socket", "none", "off"), _INLINE),
}

#: What this version can run. The one place to change when a transport arrives.
AVAILABLE: frozenset[Transport] = frozenset({"cpu", "shm", "cuda_ipc", "cuda_vmm"})


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a deployment, and properties of its model, that decide its transport."""

    transport: Literal["auto", "cpu", "shm", "cuda_ipc", "cuda_vmm"] = "auto"
    nodes: int = 1
    pp_size: int = 1
    multimodal: bool = True  #: False: the model takes text alone, so there is nothing to pool
    opted_in: bool = False  #: the model's supports_cuda_vmm_feature_transport
    disaggregated: bool = False  #: prefill and decode run apart
    gpus: bool = True  #: False: no process is to work on a GPU
    gpus_named: tuple[tuple[str, int], ...] = ()  #: key (`encoder.devices`) and highest number of each stage's GPUs


class Refusal(msgspec.Struct, frozen=True):
    """Why a transport was not taken, and what would change that."""

    rung: Transport
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class Decision(msgspec.Struct, frozen=True):
    """The transport, why, and what stood higher on the ladder. handle: what a pool is passed on by; "": no pool."""

    transport: Transport
    reason: str
    refusals: tuple[Refusal, ...] = ()
    handle: str = ""
    gpus_unused: str = ""  #: why no stage works on a GPU though some name one; "": they do, or none names one


def decide(wanted: Wanted, facts: Facts, available: Set[Transport] = AVAILABLE) -> Decision:
    """The transport of a deployment on this machine.

    Raises ConfigError, naming key and remedy, where the deployment explicitly asks for what will not work.
    """
    if wanted.transport == "auto":
        return _automatic(wanted, facts, available)
    refusal = obstacle(wanted.transport, wanted, facts) or not_yet(wanted.transport, available)
    if refusal is not None:
        problem = f"{refusal.rung} will not work here: {refusal}"
        raise ConfigError(UNPLACED, None, "transport", problem)
    if not wanted.multimodal:
        return _without_pool(TEXT_ONLY, (), wanted)
    return _taken(wanted.transport, "the deployment file asks for it", (), wanted, facts)


CPU_OPENS_NONE = "with transport: cpu no process opens a CUDA context"
TEXT_ONLY = "the model takes text alone, so no pool is reserved"


def _automatic(wanted: Wanted, facts: Facts, available: Set[Transport]) -> Decision:
    if not wanted.multimodal:
        return _without_pool(TEXT_ONLY, (), wanted)
    refusals: list[Refusal] = []
    for rung in _ladder(wanted, facts):
        refusal = _unwise(rung, wanted) or obstacle(rung, wanted, facts) or not_yet(rung, available)
        if refusal is None:
            return _taken(rung, _why(rung, wanted, facts), tuple(refusals), wanted, facts)
        refusals.append(refusal)
    return _without_pool("every pool was refused, so tensors travel inside messages", tuple(refusals), wanted)


def _without_pool(reason: str, refusals: tuple[Refusal, ...], wanted: Wanted) -> Decision:
    return Decision("cpu", reason, refusals, gpus_unused=CPU_OPENS_NONE if wanted.gpus_named else "")


def _ladder(wanted: Wanted, facts: Facts) -> tuple[Transport, ...]:
    """What `auto` tries, in order, before it settles for cpu."""
    if wanted.nodes > 1:
        return ("cuda_vmm",)
    if wanted.disaggregated and facts.has_gpu and wanted.gpus:
        return ("cuda_ipc",)
    return ("cuda_ipc", "shm")


def _why(rung: Transport, wanted: Wanted, facts: Facts) -> str:
    if rung == "cuda_ipc":
        return "one node with NVIDIA CUDA"
    if rung == "cuda_vmm":
        return "several nodes in one NVLink domain, and the model has opted in"
    if not wanted.gpus:
        return "one node, and no stage is to work on a GPU"
    return "one node, and cuda_ipc does not work here" if facts.has_gpu else "one node without CUDA"


def _taken(transport: Transport, reason: str, refusals: tuple[Refusal, ...], wanted: Wanted, facts: Facts) -> Decision:
    handles = {
        "shm": "memfd",
        "cuda_ipc": "CUDA IPC",
        "cuda_vmm": "CUDA FABRIC" if wanted.nodes > 1 else "POSIX FD",
    }
    if transport == "cpu":
        return _without_pool(reason, refusals, wanted)
    gpus_unused = ""
    if transport == "shm" and (found := _gpus(wanted, facts)) is not None:
        gpus_unused = found[0]
    return Decision(transport, reason, refusals, handles[transport], gpus_unused)


class Budget(msgspec.Struct, frozen=True):
    """The memory that pools of one kind (features or embeddings) may take on this node."""

    total_mb: int  #: MiB, of all together
    each_mb: int  #: MiB, of each
    processes: int  #: each of which has one
    gpus: tuple[int, ...]  #: numbers of those the pools lie on, as CUDA shows them; none for pools in host memory


def startup_fields(
    decision: Decision, facts: Facts, *, features: Budget, embeddings: Budget, handle_cache: bool
) -> dict[str, str | int | bool]:
    """The log lines about a decision when a deployment starts (promise P4).

    facts: those that were decided by; they name the GPUs. Without a pool nothing is said of one.
    """
    fields: dict[str, str | int | bool] = {"transport": decision.transport, "reason": decision.reason}
    if decision.transport == "cpu":
        return fields
    on_gpu = decision.transport in GPU_TRANSPORTS
    memory = "hbm" if on_gpu else "host"
    fields |= {
        "handle": decision.handle,
        "tokenizer_workers": features.processes,
        f"{memory}_budget_mib": features.total_mb,
        "mib_per_worker": features.each_mb,
        "encoder_ranks": embeddings.processes,
        f"embeddings_{memory}_budget_mib": embeddings.total_mb,
        "embeddings_mib_per_rank": embeddings.each_mb,
    }
    if on_gpu:
        fields |= {
            "base_gpu": _named(features.gpus, facts),
            "embeddings_gpu": _named(embeddings.gpus, facts),
            "cost": "the pools take HBM, so they reduce KV-cache headroom",
            "when_full": "a tensor that finds the pool full travels as an inline CPU payload",
        }
    else:
        fields["when_full"] = "a tensor that finds the pool full travels inside its message"
    if decision.transport == "cuda_ipc":
        fields["handle_cache"] = handle_cache
    return fields


def _named(gpus: tuple[int, ...], facts: Facts) -> str:
    """Name and UUID of each of these GPUs."""
    found = () if facts.cuda is None else facts.cuda.gpus
    return ", ".join(f"{found[number].name} {found[number].uuid}" for number in sorted(set(gpus)))


# --- what may stand in the way


def not_yet(rung: Transport, available: Set[Transport] = AVAILABLE) -> Refusal | None:
    """Whether this version of tensorferry can run it at all."""
    if rung in available:
        return None
    usable = ", ".join(one for one in ("shm", "cpu") if one in available)
    return Refusal(rung, f"{rung} comes with a later version", f"use {usable} or auto until then")


def obstacle(rung: Transport, wanted: Wanted, facts: Facts) -> Refusal | None:
    """Why a transport would not work for this deployment on this machine; None: it would."""
    if rung in GPU_TRANSPORTS and not wanted.gpus:
        return Refusal(rung, "no stage is to work on a GPU (gpus: false)", "leave gpus away")
    found = _OBSTACLES[rung](wanted, facts)
    return None if found is None else Refusal(rung, *found)


Found = tuple[str, str] | None  #: reason and remedy


def _unwise(rung: Transport, wanted: Wanted) -> Refusal | None:
    """What `auto` avoids. An explicit choice still gets it."""
    if rung not in GPU_TRANSPORTS:
        return None
    if not wanted.disaggregated:
        return None
    return Refusal(rung, "prefill and decode are disaggregated", f"set transport: {rung} if every reader can import it")


def _cpu(wanted: Wanted, facts: Facts) -> Found:
    return None


def _shm(wanted: Wanted, facts: Facts) -> Found:
    if wanted.nodes > 1:
        return f"shared memory is of one node, and nodes is {wanted.nodes}", "use cuda_vmm, cpu or auto, or nodes: 1"
    if not facts.host.memfd.ok:
        return (
            f"sealed memory cannot be made and passed between processes ({facts.host.memfd})",
            "allow memfd_create, pidfd_open and sendmsg in the container's seccomp profile and leave it some memory, "
            "or use cpu",
        )
    if wanted.transport == "shm" and wanted.multimodal and (found := _gpus(wanted, facts)) is not None:
        key = wanted.gpus_named[0][0]
        return f"{key} names a GPU, and {found[0]}", f"{found[1]}; or leave {key} away"
    return None


def _context(wanted: Wanted, facts: Facts) -> Found:
    """What a process needs to work on a GPU at all, wherever its pool is."""
    cuda = facts.cuda or CudaFacts("CUDA was not looked for")
    if facts.host.visible_problem:
        return facts.host.visible_problem, "set it to indices, or to UUIDs as nvidia-smi -L prints them, each once"
    if facts.host.visible == ():
        return "CUDA_VISIBLE_DEVICES hides every GPU", "unset it, or name a GPU in it"
    if cuda.missing:
        return (
            f"there is no NVIDIA CUDA here ({cuda.problem})",
            "install the NVIDIA driver and cuda-python, or start the container with its GPUs (--gpus all)",
        )
    if cuda.problem:
        return f"CUDA does not come up ({cuda.problem})", "see that nvidia-smi and other CUDA programs run here"
    if not cuda.gpus:
        return "the driver shows no GPU", "start the container with its GPUs (--gpus all)"
    for key, number in wanted.gpus_named:
        if number >= len(cuda.gpus):
            return f"{key} has {number}, and CUDA shows {len(cuda.gpus)}, counted from 0", f"correct {key}"
    return None


def _words(facts: Facts) -> Found:
    """What a GPU needs to take part in the lease protocol."""
    if facts.cuda is None or facts.cuda.words.ok:
        return None
    return (
        f"a GPU stream cannot signal through shared host memory ({facts.cuda.words})",
        "update the NVIDIA driver; in a container, raise the memlock limit (--ulimit memlock=-1)",
    )


def _gpus(wanted: Wanted, facts: Facts) -> Found:
    """Why stages of a host pool cannot work on the GPUs they name; None: they can, or name none."""
    return (_context(wanted, facts) or _words(facts)) if wanted.gpus_named else None


def _cuda(wanted: Wanted, facts: Facts) -> Found:
    """What every GPU transport needs."""
    if (found := _context(wanted, facts)) is not None:
        missing = facts.cuda is not None and facts.cuda.missing
        return (found[0], f"{found[1]}; use shm or cpu without") if missing else found
    if facts.host.wsl:
        return (
            f"this is WSL2 ({facts.host.kernel}), where processes cannot rely on sharing GPU memory",
            "use shm here, or run on Linux itself",
        )
    return _words(facts)


def _cuda_ipc(wanted: Wanted, facts: Facts) -> Found:
    if wanted.nodes > 1:
        return f"CUDA IPC is of one node, and nodes is {wanted.nodes}", "use cuda_vmm, cpu or auto, or nodes: 1"
    if (found := _cuda(wanted, facts)) is not None:
        return found
    assert facts.cuda is not None
    if not facts.cuda.ipc.ok:
        where = " on a MIG instance" if facts.cuda.gpus[0].mig else ""
        return (
            f"a second process cannot open GPU memory by CUDA IPC{where} ({facts.cuda.ipc})",
            "run all processes in one container (or with --ipc=host) on the same GPU instances; or use cuda_vmm or shm",
        )
    return None


def _cuda_vmm(wanted: Wanted, facts: Facts) -> Found:
    if wanted.pp_size != 1:
        return f"cuda_vmm needs pp_size 1, not {wanted.pp_size}", "use cuda_ipc, shm, cpu or auto"
    if (found := _cuda(wanted, facts)) is not None:
        return found
    assert facts.cuda is not None
    found = _fabric(facts, facts.cuda) if wanted.nodes > 1 else _descriptors(facts.cuda)
    if found is None and not wanted.opted_in:
        return (
            "the model has not opted in to cuda_vmm",
            "set supports_cuda_vmm_feature_transport = True on its adapter once it is known to work with it, or use "
            "another transport",
        )
    return found


def _fabric(facts: Facts, cuda: CudaFacts) -> Found:
    """Across nodes."""
    if not cuda.gpus[0].mnnvl:
        return (
            f"{cuda.gpus[0].name} is not in a multi-node NVLink domain (MNNVL: GB200 or GB300 class)",
            "use cpu across these nodes, or one node",
        )
    if not facts.host.imex:
        return (
            "MNNVL found but no IMEX channel is mounted",
            "mount /dev/nvidia-caps-imex-channels/channel0 into every container (and run nvidia-imex on every node)",
        )
    if not cuda.fabric.ok:
        return (
            f"FABRIC handles do not work ({cuda.fabric})",
            "check that nvidia-imex runs on every node of the domain (nvidia-imex-ctl -N) and that all containers have "
            "the same channel",
        )
    return None


def _descriptors(cuda: CudaFacts) -> Found:
    """Within a node."""
    if not cuda.gpus[0].vmm:
        return f"{cuda.gpus[0].name} has no virtual memory management", "update the driver, or use cuda_ipc or shm"
    if not cuda.posix_fd.ok:
        return (
            f"GPU memory cannot be shared by file descriptor ({cuda.posix_fd})",
            "run all processes as one user in one container, or use cuda_ipc or shm",
        )
    return None


_OBSTACLES: dict[Transport, Callable[[Wanted, Facts], Found]] = {
    "cpu": _cpu,
    "shm": _shm,
    "cuda_ipc": _cuda_ipc,
    "cuda_vmm": _cuda_vmm,
}
