"""What a deployment file says, as frozen structs, and what follows from them: processes, ports, GPUs, pool sizes.

`load.py` reads the file; everybody else gets a spec.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tensorferry.codecs.machine.transport import GPU_TRANSPORTS, TRANSPORTS_MEANT
from tensorferry.codecs.memory.cuda_driver import HandleKind

MIB = 1 << 20
STAGES = ("tokenizer", "encoder", "scheduler")
Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
NonNegative = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
#: The GPUs, as CUDA counts them, that the ranks of a stage take in turn.
Devices = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1024)], ...], Meta(min_length=1, max_length=1024)]
BudgetMb = Annotated[int, Meta(ge=1, lt=1 << 20)]  #: a proxy's offset is below 1 TiB


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all parts of a deployment file share: unknown keys are errors, values never change."""


class ModelSpec(Spec, frozen=True):
    adapter: str = "patch-vit"
    path: str | None = None  #: a checkpoint directory or safetensors file; None: seeded random weights
    seed: NonNegative = 0
    options: dict[str, str | int | float | bool] = {}  #: the adapter's own keys; it refuses unknown ones


class TokenizerSpec(Spec, frozen=True):
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    threads: Annotated[int, Meta(ge=1, le=256)] = 2  #: decode and resize threads of each worker
    processor: str = "qwen2-vl"
    vocabulary: str | None = None  #: path of a tokenizer.json; None: the bundled byte-level one
    devices: Devices | None = None  #: None: the first GPU with a GPU transport, else none
    options: dict[str, str | int | float | bool] = {}  #: the processor's own keys (min_pixels, max_pixels, ...)


class EncoderSpec(Spec, frozen=True):
    ranks: Annotated[int, Meta(ge=1, le=1024)] = 1
    assignment: Literal["balanced", "affinity"] = "balanced"  #: affinity: equal content to the same rank
    threads: Annotated[int, Meta(ge=1, le=256)] = 1  #: compute threads of each rank
    batch_patches: NonNegative = 16384  #: requests share a call of the adapter up to this; 0: each has its own
    batch_wait_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0  #: how long an idle rank waits for more requests
    cache_mb: Annotated[int, Meta(ge=0, lt=1 << 20)] = 0  #: MiB of embeddings that each rank keeps; 0: none
    devices: Devices | None = None


class SchedulerSpec(Spec, frozen=True):
    groups: Annotated[int, Meta(ge=1, le=1024)] = 1
    tp_size: Annotated[int, Meta(ge=1, le=64)] = 1
    attention_tp_size: Annotated[int, Meta(ge=1, le=64)] = 1  #: divides tp_size
    engine: str = "discard"
    batch_tokens: Positive = 65536  #: token budget of one batch; a single larger request runs alone
    devices: Devices | None = None
    options: dict[str, str | int | float | bool] = {}  #: the engine's own keys (service_ms, ...)


class PoolSpec(Spec, frozen=True):
    budget_mb: BudgetMb = 1024  #: MiB; a hard cap per node, shared by all tokenizer workers
    slots: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096  #: leases in flight, per pool
    when_full: Literal["inline", "wait"] = "inline"
    wait_ms: NonNegative = 50  #: with `when_full: wait`: how long at most, then inline
    inline_below_kb: NonNegative = 32  #: KiB; smaller tensors travel inside the message
    handle_cache: bool = True  #: cuda_ipc: consumers keep a pool open between tensors
    chunk_mb: Annotated[int, Meta(ge=2, lt=1 << 20)] = 64  #: MiB; cuda_vmm: what pools grow and shrink by, at most
    idle_s: Annotated[float, Meta(ge=0.01, le=1e6)] = 3.0  #: cuda_vmm: after so long unused a chunk is given back
    grow_wait_ms: NonNegative = 5  #: cuda_vmm: how long a tensor waits at most for a chunk, then inline
    acknowledge: Literal["words", "messages"] = "words"  #: cuda_vmm: messages is how it is done across nodes
    recycle_s: Seconds = 0.05  #: how often every pool takes back what was acknowledged, also without new traffic


class EmbeddingsPoolSpec(Spec, frozen=True):
    budget_mb: BudgetMb = 256  #: MiB per node, shared by all encoder ranks
    slots: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    inline_below_kb: NonNegative = 32


class LimitsSpec(Spec, frozen=True):
    in_flight_requests: Positive = 256  #: per tokenizer worker; beyond it clients hear `busy`
    in_flight_items: Positive = 4096  #: the same, of all requests together
    in_flight_mb: Positive = (
        2048  #: MiB; the same: of their messages and pixel tensors. One request alone may have more
    )
    client_requests_per_s: Positive | None = None  #: of each client, at each worker; beyond it `busy`. None: any number
    item_pixels: Positive = 40_000_000  #: width x height of one image, from its header
    item_mb: Positive = 64  #: MiB of one encoded image
    request_mb: Positive = 512  #: MiB of one request's message, and of its pixel tensors
    request_items: Annotated[int, Meta(ge=1, le=4096)] = 256  #: a message has 4097 frames at most
    request_tokens: Positive = 1_000_000
    request_timeout_s: Seconds = 120.0  #: at most what a client may ask for


class NetworkSpec(Spec, frozen=True):
    """Sockets beyond the runtime directory, where `bind` is set; wider than loopback with `security.keys` alone."""

    bind: str | None = None  #: the interface at which front doors listen; None: clients are on this machine, by ipc
    advertise: str | None = None  #: what clients connect to; None: the same as `bind`
    port: Annotated[int, Meta(ge=1, le=65535)] = 7700  #: of tokenizer 0's front door; +1 per worker, then the inboxes
    inboxes: Literal["ipc", "tcp"] = "ipc"  #: where messages between stages travel


class SecuritySpec(Spec, frozen=True):
    keys: str | None = None  #: a folder of `tensorferry keys new`: CURVE on all sockets of `network`


class TimeoutsSpec(Spec, frozen=True):
    start_s: Seconds = 120.0  #: until every stage is ready
    drain_s: Seconds = 30.0  #: grace period of a stop
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=1e6)] = 1.0
    quarantine_s: Seconds = 5.0  #: without a heartbeat for this long a peer gets no new work
    ready_s: Seconds = 10.0  #: a consumer's wait for a lease's bytes


class RestartsSpec(Spec, frozen=True):
    most: NonNegative = 5  #: of a process in a row, none of whose lives was long; then the deployment stops. 0: at once
    healthy_s: Seconds = 10.0  #: a life that was ready for so long was long


class TelemetrySpec(Spec, frozen=True):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "console"
    prometheus_port: Annotated[int, Meta(ge=1, le=65000)] | None = None  #: loopback; +1 per process, see docs
    otlp_endpoint: str | None = None  #: URL of an OpenTelemetry receiver, for spans; None: none are made
    record: str | None = None  #: a file for live traffic, as a trace; what `up --record` sets
    record_media: bool = False  #: with words and images as they are; else only how many tokens, and of which size


class Deployment(Spec, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    transport: Annotated[
        Literal["auto", "cpu", "shm", "cuda_ipc", "cuda_vmm"], Meta(extra={"spellings": TRANSPORTS_MEANT})
    ] = "auto"
    gpus: bool = True  #: False: no stage works on a GPU, whatever `devices` it has
    nodes: Positive = 1
    pp_size: Positive = 1  #: pipeline-parallel size of the engine behind the schedulers; cuda_vmm needs 1
    disaggregation: Literal["none", "prefill_decode"] = "none"  #: of that engine; `auto` then keeps off the GPU pools
    frontend: str = "python"
    runtime_dir: str | None = None  #: None: $XDG_RUNTIME_DIR/tensorferry or /tmp/tensorferry-<uid>
    model: ModelSpec = ModelSpec()
    tokenizer: TokenizerSpec = TokenizerSpec()
    encoder: EncoderSpec = EncoderSpec()
    scheduler: SchedulerSpec = SchedulerSpec()
    pool: PoolSpec = PoolSpec()
    embeddings_pool: EmbeddingsPoolSpec = EmbeddingsPoolSpec()
    limits: LimitsSpec = LimitsSpec()
    network: NetworkSpec = NetworkSpec()
    security: SecuritySpec = SecuritySpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()
    restarts: RestartsSpec = RestartsSpec()
    telemetry: TelemetrySpec = TelemetrySpec()


def ranks_of(deployment: Deployment) -> dict[str, int]:
    """How many processes each stage has."""
    return {
        "tokenizer": deployment.tokenizer.workers,
        "encoder": deployment.encoder.ranks,
        "scheduler": deployment.scheduler.groups * deployment.scheduler.tp_size,
    }


def port_offset(deployment: Deployment, stage: str, rank: int) -> int:
    """The number of a process among all of its deployment: tokenizers come first. Ports are counted by it."""
    offset = rank
    for earlier, ranks in ranks_of(deployment).items():
        if earlier == stage:
            break
        offset += ranks
    return offset


def most_requests(deployment: Deployment) -> int:
    """How many requests a rank behind the tokenizers keeps at once: twice what all tokenizers may have in flight.

    More are not of this deployment.
    """
    return 2 * deployment.tokenizer.workers * deployment.limits.in_flight_requests


def device_of(deployment: Deployment, stage: str, rank: int) -> int | None:
    """The GPU that a rank works on; None for one that opens no CUDA context, as with `transport: cpu` nobody does."""
    spec: TokenizerSpec | EncoderSpec | SchedulerSpec = getattr(deployment, stage)
    devices = spec.devices or ((0,) if deployment.transport in GPU_TRANSPORTS else None)
    if devices is None or not deployment.gpus or deployment.transport == "cpu":
        return None
    return devices[rank % len(devices)]


def mail_of(deployment: Deployment) -> HandleKind | None:
    """How pools hand their chunks over that share no pages with their consumers; None: they do share them."""
    if deployment.transport != "cuda_vmm" or (deployment.nodes == 1 and deployment.pool.acknowledge == "words"):
        return None
    return "fabric" if deployment.nodes > 1 else "posix_fd"


def names_gpus(deployment: Deployment) -> dict[str, int]:
    """The keys of a deployment that name GPUs for a stage, which is then to use them; the highest number of each."""
    if not deployment.gpus:
        return {}
    named = {f"{stage}.devices": getattr(deployment, stage).devices for stage in STAGES}
    return {key: max(devices) for key, devices in named.items() if devices is not None}


def tokenizer_pool_nbytes(deployment: Deployment) -> int:
    """What each tokenizer worker's pool may take, so that all together keep to the node's budget; 0 for `cpu`."""
    return _share_mb(deployment, deployment.pool.budget_mb, deployment.tokenizer.workers) * MIB


def encoder_pool_nbytes(deployment: Deployment) -> int:
    """What each encoder rank's pool may take, so that all together keep to the node's budget; 0 for `cpu`."""
    return _share_mb(deployment, deployment.embeddings_pool.budget_mb, deployment.encoder.ranks) * MIB


def _share_mb(deployment: Deployment, budget_mb: int, processes: int) -> int:
    return 0 if deployment.transport == "cpu" else budget_mb // processes
