"""The policy of promises P1-P4 and P7: every branch of `decide`, every reason and remedy, and what the log says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tensorferry.cli import transport as cli_transport
from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.machine import transport as policy
from tensorferry.codecs.machine.facts import UNTRIED, CudaFacts, Facts, Gpu, HostFacts, Trial
from tensorferry.codecs.machine.transport import (
    AVAILABLE,
    TRANSPORTS,
    Budget,
    Wanted,
    decide,
    not_yet,
    obstacle,
    startup_fields,
)
from tensorferry.pipeline.deployment.load import Deployment, EncoderSpec, SchedulerSpec, require_available
from tensorferry.stages.adapters.registry import BUILT_IN

ALL = frozenset(TRANSPORTS)
WORKS = Trial(True)
NOT_PERMITTED = Trial(False, "create", "cuMemCreate: CUDA_ERROR_NOT_PERMITTED")
H200 = Gpu("NVIDIA H200", "GPU-0001", vmm=True, posix_fd=True, fabric=True)
GB200 = Gpu("NVIDIA GB200", "GPU-0002", vmm=True, posix_fd=True, fabric=True, mnnvl=True)
NO_DRIVER = CudaFacts("libcuda.so.1 cannot be loaded", missing=True)


def host(**changes: Any) -> HostFacts:
    """A plain Linux machine."""
    plain = HostFacts(
        kernel="6.18.0",
        memfd=WORKS,
        shm_nbytes=1 << 30,
        available_nbytes=1 << 34,
        memlock_nbytes=None,
        open_files=1 << 16,
        seccomp=0,
        nested_pids=False,
        imex=False,
        mps=False,
    )
    return msgspec.structs.replace(plain, **changes)


def cuda(*gpus: Gpu, **changes: Any) -> CudaFacts:
    """CUDA on a machine where everything works, but FABRIC handles only where there is a domain for them."""
    gpus = gpus or (H200,)
    fabric = WORKS if gpus[0].mnnvl else NOT_PERMITTED
    every = CudaFacts(driver=13000, gpus=gpus, words=WORKS, ipc=WORKS, posix_fd=WORKS, fabric=fabric)
    return msgspec.structs.replace(every, **changes)


CPU_ONLY = Facts(host(), NO_DRIVER)
ONE_H200 = Facts(host(), cuda())
TWO_H200 = Facts(host(), cuda(H200, msgspec.structs.replace(H200, uuid="GPU-0003")))
RACK = Facts(host(imex=True), cuda(GB200))
FEATURES, EMBEDDINGS = Budget(1024, 341, 3, (1, 1, 1)), Budget(256, 128, 2, (0, 1))

# --- auto, one node (P2)


def test_p2_one_node_with_cuda_is_cuda_ipc() -> None:
    decision = decide(Wanted(), ONE_H200, ALL)
    assert (decision.transport, decision.refusals) == ("cuda_ipc", ())
    assert decision.reason == "one node with NVIDIA CUDA"
    assert decision.handle == "CUDA IPC"


def test_p2_cuda_ipc_asks_for_no_opt_in_and_no_pp_size() -> None:
    assert decide(Wanted(opted_in=False, pp_size=4), ONE_H200, ALL).transport == "cuda_ipc"


def test_p2_one_node_without_cuda_is_shm() -> None:
    decision = decide(Wanted(), CPU_ONLY, ALL)
    assert (decision.transport, decision.reason, decision.handle) == ("shm", "one node without CUDA", "memfd")
    (refusal,) = decision.refusals
    assert refusal.rung == "cuda_ipc"
    assert refusal.reason == "there is no NVIDIA CUDA here (libcuda.so.1 cannot be loaded)"
    assert "--gpus all" in refusal.remedy


def test_p2_facts_that_nobody_gathered_are_no_cuda() -> None:
    decision = decide(Wanted(), Facts(host()), ALL)
    assert decision.transport == "shm"
    assert "nobody has looked for CUDA" in decision.refusals[0].reason


# --- GPUs that stages are given, whatever the pool is


@pytest.mark.parametrize("facts", [CPU_ONLY, Facts(host())], ids=["none here", "nobody looked"])
def test_an_explicit_shm_whose_stages_name_gpus_needs_cuda(facts: Facts) -> None:
    wanted = Wanted(transport="shm", gpus_named=(("encoder.devices", 0),))
    with pytest.raises(ConfigError, match=r"encoder\.devices names a GPU, and .*; or leave encoder\.devices away"):
        decide(wanted, facts, ALL)
    assert decide(wanted, ONE_H200, ALL).gpus_unused == ""
    assert decide(Wanted(transport="shm"), facts, ALL).gpus_unused == ""


@pytest.mark.parametrize("facts", [ONE_H200, CPU_ONLY], ids=["gpu", "none"])
@pytest.mark.parametrize("disaggregated", [False, True])
def test_auto_keeps_off_gpus_that_no_stage_is_to_use(facts: Facts, disaggregated: bool) -> None:
    decision = decide(Wanted(gpus=False, disaggregated=disaggregated), facts, ALL)
    assert (decision.transport, decision.reason) == ("shm", "one node, and no stage is to work on a GPU")
    assert decision.refusals[0].rung == "cuda_ipc"
    refusal = obstacle("cuda_ipc", Wanted(gpus=False), facts)
    assert refusal is not None
    assert refusal.reason == "no stage is to work on a GPU (gpus: false)"


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
def test_a_gpu_that_cuda_does_not_show_is_named(transport: Any) -> None:
    wanted = Wanted(transport=transport, gpus_named=(("encoder.devices", 5),))
    with pytest.raises(ConfigError, match=r"encoder\.devices has 5, and CUDA shows 1, counted from 0"):
        decide(wanted, ONE_H200, ALL)
    stepped_down = decide(Wanted(gpus_named=wanted.gpus_named), ONE_H200, ALL)
    assert stepped_down.transport == "shm"
    assert stepped_down.gpus_unused == "encoder.devices has 5, and CUDA shows 1, counted from 0"


def test_stages_of_a_host_pool_may_use_gpus_on_wsl() -> None:
    facts = Facts(host(kernel="6.6.87.2-microsoft-standard-WSL2"), cuda())
    wanted = Wanted(transport="shm", gpus_named=(("encoder.devices", 0),))
    assert decide(wanted, facts, ALL).gpus_unused == ""


def test_a_text_only_model_needs_no_gpu_whatever_its_stages_name() -> None:
    wanted = Wanted(transport="shm", multimodal=False, gpus_named=(("encoder.devices", 0),))
    for facts in (ONE_H200, CPU_ONLY):
        assert decide(wanted, facts, ALL).transport == "cpu"


def test_gpus_that_cannot_be_used_after_a_step_down_are_told() -> None:
    wanted = Wanted(gpus_named=(("encoder.devices", 0),))
    assert decide(wanted, CPU_ONLY, ALL).gpus_unused == "there is no NVIDIA CUDA here (libcuda.so.1 cannot be loaded)"
    assert decide(Wanted(), CPU_ONLY, ALL).gpus_unused == ""
    facts = IPC_FAULTS["import"][0]
    assert (decide(wanted, facts, ALL).transport, decide(wanted, facts, ALL).gpus_unused) == ("shm", "")


@pytest.mark.parametrize("wanted", [Wanted(transport="cpu"), Wanted(transport="auto", multimodal=False)])
def test_with_cpu_no_process_opens_a_context(wanted: Wanted) -> None:
    assert decide(wanted, ONE_H200, ALL).gpus_unused == ""
    named = msgspec.structs.replace(wanted, gpus_named=(("tokenizer.devices", 0),))
    assert decide(named, ONE_H200, ALL).gpus_unused == "with transport: cpu no process opens a CUDA context"


def test_p2_without_a_memfd_it_is_cpu() -> None:
    facts = Facts(host(memfd=Trial(False, "create", "Operation not permitted")), NO_DRIVER)
    decision = decide(Wanted(), facts, ALL)
    assert (decision.transport, decision.handle) == ("cpu", "")
    assert decision.reason == "every pool was refused, so tensors travel inside messages"
    assert [refusal.rung for refusal in decision.refusals] == ["cuda_ipc", "shm"]
    assert "create: Operation not permitted" in decision.refusals[1].reason
    assert "seccomp" in decision.refusals[1].remedy


#: Everything that stands between a machine and its GPU pool: facts -> words of the reason, words of the remedy.
GPU_FAULTS: dict[str, tuple[Facts, str, str]] = {
    "no driver": (CPU_ONLY, "no NVIDIA CUDA here (libcuda.so.1", "--gpus all"),
    "driver broken": (
        Facts(host(), CudaFacts("cuInit: CUDA_ERROR_SYSTEM_NOT_READY")),
        "does not come up (cuInit: CUDA_ERROR_SYSTEM_NOT_READY)",
        "nvidia-smi",
    ),
    "driver hangs": (
        Facts(host(), CudaFacts("the driver did not answer within 60 s")),
        "did not answer within 60 s",
        "nvidia-smi",
    ),
    "no device": (Facts(host(), CudaFacts(driver=13000)), "shows no GPU", "--gpus all"),
    "hidden": (Facts(host(visible=()), NO_DRIVER), "CUDA_VISIBLE_DEVICES hides every GPU", "unset it"),
    "variable": (
        Facts(host(visible_problem="CUDA_VISIBLE_DEVICES='0,0' names 0 twice"), cuda()),
        "CUDA_VISIBLE_DEVICES='0,0' names 0 twice",
        "nvidia-smi -L",
    ),
    "WSL2": (
        Facts(host(kernel="5.15.90.1-microsoft-standard-WSL2"), cuda()),
        "this is WSL2 (5.15.90.1-microsoft-standard-WSL2)",
        "use shm here",
    ),
    "words": (
        Facts(host(), cuda(words=Trial(False, "register", "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"))),
        "register: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY",
        "memlock",
    ),
}
IPC_FAULTS: dict[str, tuple[Facts, str, str]] = {
    "import": (
        Facts(host(), cuda(ipc=Trial(False, "import", "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE"))),
        "cannot open GPU memory by CUDA IPC (import: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE)",
        "--ipc=host",
    ),
    "MIG": (
        Facts(
            host(), cuda(Gpu("A100 MIG 1g.5gb", "MIG-1", mig=True), ipc=Trial(False, "export", "cuIpcGetMemHandle: X"))
        ),
        "by CUDA IPC on a MIG instance (export",
        "same GPU instances",
    ),
}


@pytest.mark.parametrize("name", GPU_FAULTS | IPC_FAULTS)
def test_b17_a_gpu_that_cannot_costs_one_rung_and_one_reason(name: str) -> None:
    facts, reason, remedy = (GPU_FAULTS | IPC_FAULTS)[name]
    decision = decide(Wanted(), facts, ALL)
    assert decision.transport == "shm"
    (refusal,) = decision.refusals
    assert refusal.rung == "cuda_ipc"
    assert reason in refusal.reason
    assert remedy in refusal.remedy


def test_p2_a_gpu_whose_trial_failed_is_told_apart_from_none() -> None:
    assert decide(Wanted(), IPC_FAULTS["import"][0], ALL).reason == "one node, and cuda_ipc does not work here"
    assert decide(Wanted(), CPU_ONLY, ALL).reason == "one node without CUDA"


# --- auto, prefill and decode apart


def test_p2_disaggregated_on_cuda_is_cpu() -> None:
    decision = decide(Wanted(disaggregated=True), ONE_H200, ALL)
    assert decision.transport == "cpu"
    (refusal,) = decision.refusals
    assert (refusal.rung, refusal.reason) == ("cuda_ipc", "prefill and decode are disaggregated")
    assert "transport: cuda_ipc" in refusal.remedy


def test_p2_disaggregated_over_nodes_is_cpu() -> None:
    decision = decide(Wanted(disaggregated=True, nodes=2, opted_in=True), RACK, ALL)
    assert decision.transport == "cpu"
    assert [(r.rung, r.reason) for r in decision.refusals] == [("cuda_vmm", "prefill and decode are disaggregated")]


def test_p2_without_cuda_disaggregation_changes_nothing() -> None:
    assert decide(Wanted(disaggregated=True), CPU_ONLY, ALL).transport == "shm"


# --- auto, several nodes


def test_p2_several_nodes_in_a_domain_are_cuda_vmm() -> None:
    decision = decide(Wanted(nodes=2, opted_in=True), RACK, ALL)
    assert (decision.transport, decision.handle, decision.refusals) == ("cuda_vmm", "CUDA FABRIC", ())
    assert decision.reason == "several nodes in one NVLink domain, and the model has opted in"


VMM_FAULTS: dict[str, tuple[Wanted, Facts, str, str]] = {
    "no MNNVL": (
        Wanted(nodes=2, opted_in=True),
        Facts(host(imex=True), cuda()),
        "NVIDIA H200 is not in a multi-node NVLink domain",
        "use cpu across these nodes",
    ),
    "no IMEX": (
        Wanted(nodes=2, opted_in=True),
        Facts(host(), cuda(GB200)),
        "MNNVL found but no IMEX channel is mounted",
        "mount /dev/nvidia-caps-imex-channels/channel0",
    ),
    "FABRIC fails": (
        Wanted(nodes=2, opted_in=True),
        Facts(host(imex=True), cuda(GB200, fabric=NOT_PERMITTED)),
        "FABRIC handles do not work (create: cuMemCreate: CUDA_ERROR_NOT_PERMITTED)",
        "nvidia-imex",
    ),
    "no opt-in": (
        Wanted(nodes=2, opted_in=False),
        RACK,
        "the model has not opted in to cuda_vmm",
        "supports_cuda_vmm_feature_transport = True",
    ),
    "pp_size": (Wanted(nodes=2, opted_in=True, pp_size=2), RACK, "cuda_vmm needs pp_size 1, not 2", "cpu or auto"),
    "no CUDA": (Wanted(nodes=2, opted_in=True), CPU_ONLY, "no NVIDIA CUDA here", "--gpus all"),
}


@pytest.mark.parametrize("name", VMM_FAULTS)
def test_p2_several_nodes_otherwise_are_cpu_for_one_reason(name: str) -> None:
    wanted, facts, reason, remedy = VMM_FAULTS[name]
    decision = decide(wanted, facts, ALL)
    assert decision.transport == "cpu"
    (refusal,) = decision.refusals
    assert refusal.rung == "cuda_vmm"
    assert reason in refusal.reason
    assert remedy in refusal.remedy


def test_p2_every_fault_has_words_of_its_own() -> None:
    reasons = [decide(wanted, facts, ALL).refusals[0].reason for wanted, facts, _, _ in VMM_FAULTS.values()]
    reasons += [decide(Wanted(), facts, ALL).refusals[0].reason for facts, _, _ in IPC_FAULTS.values()]
    assert len(set(reasons)) == len(reasons)


# --- an explicit choice (P3)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_p3_what_works_is_taken_as_asked(transport: Any) -> None:
    facts = ONE_H200
    decision = decide(Wanted(transport=transport, opted_in=True, disaggregated=True), facts, ALL)
    assert (decision.transport, decision.refusals) == (transport, ())
    assert decision.reason == "the deployment file asks for it"
    assert decision.handle == {"cpu": "", "shm": "memfd", "cuda_ipc": "CUDA IPC", "cuda_vmm": "POSIX FD"}[transport]


@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_vmm"])
@pytest.mark.parametrize("name", GPU_FAULTS)
def test_p3_a_gpu_transport_without_working_cuda_is_an_error(transport: Any, name: str) -> None:
    facts, reason, remedy = GPU_FAULTS[name]
    error = refused(Wanted(transport=transport, opted_in=True), facts)
    assert error.problem.startswith(f"{transport} will not work here: ")
    assert reason in error.problem
    assert remedy in error.problem


@pytest.mark.parametrize("name", IPC_FAULTS)
def test_p3_cuda_ipc_that_failed_its_trial_is_an_error(name: str) -> None:
    facts, reason, remedy = IPC_FAULTS[name]
    error = refused(Wanted(transport="cuda_ipc"), facts)
    assert reason in error.problem
    assert remedy in error.problem


@pytest.mark.parametrize("name", VMM_FAULTS)
def test_p3_cuda_vmm_over_nodes_is_an_error_for_each_reason(name: str) -> None:
    wanted, facts, reason, remedy = VMM_FAULTS[name]
    error = refused(msgspec.structs.replace(wanted, transport="cuda_vmm"), facts)
    assert reason in error.problem
    assert remedy in error.problem


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(host(), cuda(Gpu("Old", "GPU-1"))), "Old has no virtual memory management"),
        (Facts(host(), cuda(posix_fd=Trial(False, "import", "no"))), "shared by file descriptor (import: no)"),
    ],
)
def test_p3_cuda_vmm_on_one_node_needs_descriptors(facts: Facts, reason: str) -> None:
    assert reason in refused(Wanted(transport="cuda_vmm", opted_in=True), facts).problem


def test_p3_cuda_vmm_on_one_node_needs_no_fabric() -> None:
    assert decide(Wanted(transport="cuda_vmm", opted_in=True), ONE_H200, ALL).handle == "POSIX FD"


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
def test_p3_what_is_of_one_node_is_an_error_on_two(transport: Any) -> None:
    error = refused(Wanted(transport=transport, nodes=2), RACK)
    assert "nodes is 2" in error.problem
    assert "nodes: 1" in error.problem


def test_p3_shm_without_sealed_memory_is_an_error() -> None:
    error = refused(Wanted(transport="shm"), Facts(host(memfd=Trial(False, "pass", "refused")), cuda()))
    assert "(pass: refused)" in error.problem
    assert "or use cpu" in error.problem


def test_p3_cpu_always_works() -> None:
    worst = Facts(host(memfd=UNTRIED), CudaFacts("broken"))
    assert decide(Wanted(transport="cpu", nodes=9, pp_size=2), worst, frozenset({"cpu"})).transport == "cpu"


def refused(wanted: Wanted, facts: Facts) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        decide(wanted, facts, ALL)
    assert caught.value.key == "transport"
    return caught.value


def test_p3_an_explicit_choice_is_what_it_says_or_an_error_whatever_the_facts() -> None:
    """Every combination: never a lesser transport, and always a remedy."""
    trials = [WORKS, Trial(False, "import", "no")]
    for transport, nodes, pp_size, opted_in, imex, memfd, gpu, trial in itertools.product(
        TRANSPORTS, [1, 2], [1, 2], [True, False], [True, False], trials, [None, H200, GB200], trials
    ):
        found = NO_DRIVER if gpu is None else cuda(gpu, ipc=trial, posix_fd=trial, fabric=trial)
        facts = Facts(host(imex=imex, memfd=memfd), found)
        wanted = Wanted(transport=transport, nodes=nodes, pp_size=pp_size, opted_in=opted_in)
        refusal = obstacle(transport, wanted, facts)
        if refusal is None:
            assert decide(wanted, facts, ALL).transport == transport
        else:
            assert str(refusal) in refused(wanted, facts).problem
            assert refusal.reason
            assert refusal.remedy
        automatic = decide(msgspec.structs.replace(wanted, transport="auto"), facts, ALL)
        assert automatic.transport == "cpu" or obstacle(automatic.transport, wanted, facts) is None
        assert len({one.rung for one in automatic.refusals}) == len(automatic.refusals)


# --- what comes later


def test_what_this_version_lacks_is_refused_as_such() -> None:
    decision = decide(Wanted(), ONE_H200, frozenset({"cpu", "shm"}))
    assert decision.transport == "shm"
    assert [(r.rung, r.reason) for r in decision.refusals] == [("cuda_ipc", "cuda_ipc comes with a later version")]


def test_one_place_says_what_this_version_has() -> None:
    for transport in TRANSPORTS:
        deployment = Deployment(name="a", transport=transport)
        if transport in AVAILABLE:
            assert not_yet(transport) is None
            require_available(deployment)
        else:
            with pytest.raises(ConfigError) as caught:
                require_available(deployment)
            assert caught.value.problem == str(not_yet(transport))
            assert "later version; use shm, cpu or auto until then" in caught.value.problem


# --- text alone


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_p2_a_model_of_text_alone_has_no_pool_and_the_log_names_none(transport: Any) -> None:
    decision = decide(Wanted(transport=transport, multimodal=False, opted_in=True), ONE_H200, ALL)
    assert (decision.transport, decision.refusals) == ("cpu", ())
    fields = startup_fields(decision, ONE_H200, features=FEATURES, embeddings=EMBEDDINGS, handle_cache=True)
    assert fields == {"transport": "cpu", "reason": "the model takes text alone, so no pool is reserved"}


def test_p3_a_model_of_text_alone_does_not_excuse_an_impossible_choice() -> None:
    assert "no NVIDIA CUDA" in refused(Wanted(transport="cuda_ipc", multimodal=False), CPU_ONLY).problem


def test_text_only_is_the_adapter_for_that() -> None:
    assert {name for name, entry in BUILT_IN.items() if not entry.multimodal} == {"text-only"}


# --- the log (P4)


def test_p4_the_log_of_gpu_pools() -> None:
    decision = decide(Wanted(), TWO_H200, ALL)
    assert startup_fields(decision, TWO_H200, features=FEATURES, embeddings=EMBEDDINGS, handle_cache=False) == {
        "transport": "cuda_ipc",
        "reason": "one node with NVIDIA CUDA",
        "handle": "CUDA IPC",
        "tokenizer_workers": 3,
        "hbm_budget_mib": 1024,
        "mib_per_worker": 341,
        "encoder_ranks": 2,
        "embeddings_hbm_budget_mib": 256,
        "embeddings_mib_per_rank": 128,
        "base_gpu": "NVIDIA H200 GPU-0003",
        "embeddings_gpu": "NVIDIA H200 GPU-0001, NVIDIA H200 GPU-0003",
        "cost": "the pools take HBM, so they reduce KV-cache headroom",
        "when_full": "a tensor that finds the pool full travels as an inline CPU payload",
        "handle_cache": False,
    }


@pytest.mark.parametrize(("nodes", "facts", "handle"), [(1, ONE_H200, "POSIX FD"), (2, RACK, "CUDA FABRIC")])
def test_p4_the_log_says_what_handles_cuda_vmm_uses(nodes: int, facts: Facts, handle: str) -> None:
    decision = decide(Wanted(transport="cuda_vmm", nodes=nodes, opted_in=True), facts, ALL)
    budget = Budget(64, 64, 1, (0,))
    fields = startup_fields(decision, facts, features=budget, embeddings=budget, handle_cache=True)
    assert (fields["handle"], fields["hbm_budget_mib"]) == (handle, 64)
    assert "handle_cache" not in fields, "is of cuda_ipc"


def test_p4_the_log_of_host_pools_speaks_of_no_hbm() -> None:
    features, embeddings = Budget(64, 32, 2, ()), Budget(32, 32, 1, ())
    decision = decide(Wanted(), CPU_ONLY)
    fields = startup_fields(decision, CPU_ONLY, features=features, embeddings=embeddings, handle_cache=True)
    assert (fields["host_budget_mib"], fields["mib_per_worker"]) == (64, 32)
    assert (fields["embeddings_host_budget_mib"], fields["embeddings_mib_per_rank"]) == (32, 32)
    assert not [key for key in fields if "hbm" in key or "gpu" in key or key in ("cost", "handle_cache")]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Deployment, list[Any]]]:
    """`cli.transport.settle` on a machine with these facts: the deployment, and what was logged."""

    def settle(facts: Facts, available: frozenset[Any] = ALL, **keys: Any) -> tuple[Deployment, list[Any]]:
        monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: facts if cuda else Facts(facts.host))
        monkeypatch.setattr(cli_transport, "decide", lambda wanted, facts: policy.decide(wanted, facts, available))
        with capture_logs() as logs:
            deployment = cli_transport.settle(Deployment(name="a", **keys), {})
        return deployment, logs

    return settle


def test_p2_one_line_for_every_refused_rung_and_one_for_the_outcome(settled) -> None:
    deployment, logs = settled(Facts(host(memfd=Trial(False, "create", "no")), NO_DRIVER))
    assert deployment.transport == "cpu"
    assert [(line["event"], line["transport"], line["log_level"]) for line in logs] == [
        ("transport_refused", "cuda_ipc", "info"),
        ("transport_refused", "shm", "info"),
        ("transport_chosen", "cpu", "info"),
    ]
    assert all(line["reason"] for line in logs)
    assert all(line["remedy"] for line in logs[:-1])


def test_p2_a_gpu_that_is_not_used_is_worth_a_warning(settled) -> None:
    _, logs = settled(IPC_FAULTS["import"][0])
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("transport_refused", "warning"),
        ("transport_chosen", "info"),
    ]


def test_p4_the_start_of_a_gpu_deployment(settled) -> None:
    deployment, (line,) = settled(ONE_H200)
    assert deployment.transport == "cuda_ipc"
    assert line["hbm_budget_mib"] == 1024
    assert line["handle_cache"] is True


def test_p2_a_deployment_of_text_alone_logs_no_pool(settled) -> None:
    from tensorferry.pipeline.deployment.load import ModelSpec, tokenizer_pool_nbytes

    deployment, (line,) = settled(ONE_H200, model=ModelSpec(adapter="text-only"))
    assert (deployment.transport, tokenizer_pool_nbytes(deployment)) == ("cpu", 0)
    assert not [key for key in line if "mib" in key or "gpu" in key]


@pytest.mark.parametrize(("transport", "looks"), [("cpu", False), ("shm", False), ("auto", True), ("cuda_ipc", True)])
def test_b14_cuda_is_looked_for_only_where_it_may_matter(
    monkeypatch: pytest.MonkeyPatch, transport: Any, looks: bool
) -> None:
    asked = []

    def gather(environ: object, cuda: bool) -> Facts:
        asked.append(cuda)
        return ONE_H200

    monkeypatch.setattr(cli_transport, "gather", gather)
    monkeypatch.setattr(cli_transport, "decide", lambda wanted, facts: policy.decide(wanted, facts, ALL))
    cli_transport.settle(Deployment(name="a", transport=transport), {})
    assert asked == [looks]


# --- what a deployment asks for


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, Wanted()),
        ({"transport": "cuda_vmm"}, Wanted(transport="cuda_vmm", opted_in=True)),
        ({"nodes": 2}, Wanted(nodes=2, opted_in=True)),
        ({"pp_size": 2}, Wanted(pp_size=2)),
        ({"gpus": False}, Wanted(gpus=False)),
        ({"scheduler": SchedulerSpec(devices=(0, 3))}, Wanted(gpus_named=(("scheduler.devices", 3),))),
        ({"disaggregation": "prefill_decode"}, Wanted(disaggregated=True)),
    ],
)
def test_p7_what_the_policy_is_told(keys: dict[str, Any], wanted: Wanted) -> None:
    assert cli_transport.wanted_by(Deployment(name="a", **keys)) == wanted


# --- from file to decision


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Deployment, tuple[str, ...]]]:
    """`load_to_run` of a file with this text, on a machine with these facts."""

    def load(text: str, facts: Facts, *settings: str) -> tuple[Deployment, tuple[str, ...]]:
        monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: facts)
        monkeypatch.setattr(cli_transport.counters, "configure", lambda spec, **bound: None)
        file = tmp_path / "a.yaml"
        file.write_text(text)
        with capture_logs():
            return cli_transport.load_to_run(file, settings, {})

    return load


def test_what_was_decided_goes_to_the_stages_as_a_setting(loaded) -> None:
    deployment, settings = loaded("name: a\n", CPU_ONLY, "pool.budget_mb=64")
    assert (deployment.transport, settings) == ("shm", ("pool.budget_mb=64", "transport=shm"))
    again, same = loaded("name: a\n", CPU_ONLY, *settings)
    assert (again, same) == (deployment, settings)


def test_a_setting_that_says_auto_is_replaced(loaded) -> None:
    deployment, settings = loaded("name: a\ntransport: cpu\n", CPU_ONLY, "transport=auto")
    assert (deployment.transport, settings) == ("shm", ("transport=shm",))


NAMES_A_GPU = "name: a\nencoder: {devices: [0]}\n"


def test_stages_do_without_the_gpus_they_name_where_auto_finds_no_cuda(loaded) -> None:
    deployment, settings = loaded(NAMES_A_GPU, CPU_ONLY, "pool.slots=64")
    assert (deployment.gpus, settings) == (False, ("pool.slots=64", "transport=shm", "gpus=false"))
    assert loaded(NAMES_A_GPU, CPU_ONLY, *settings) == (deployment, settings)
    facts = IPC_FAULTS["import"][0]
    assert loaded(NAMES_A_GPU, facts)[0].gpus, "there is CUDA, and a pool in host memory"


def test_gpus_that_are_not_used_are_told(settled) -> None:
    _, logs = settled(ONE_H200, transport="cpu", encoder=EncoderSpec(devices=(0,)))
    [line] = [line for line in logs if line["event"] == "gpus_unused"]
    assert (line["settings"], line["log_level"]) == (["encoder.devices"], "warning")
    assert line["reason"] == "with transport: cpu no process opens a CUDA context"


def test_cuda_is_looked_for_where_a_stage_of_a_host_pool_names_a_gpu(settled) -> None:
    encoder = EncoderSpec(devices=(0,))
    assert settled(ONE_H200, transport="shm", encoder=encoder)[0].encoder == encoder
    with pytest.raises(ConfigError, match=r"encoder\.devices names a GPU"):
        settled(CPU_ONLY, transport="shm", encoder=encoder)


def test_an_explicit_choice_adds_no_setting(loaded) -> None:
    assert loaded("name: a\ntransport: cpu\n", CPU_ONLY)[1] == ()


def test_p3_an_impossible_choice_names_file_line_and_key(loaded, tmp_path: Path) -> None:
    facts = Facts(host(memfd=Trial(False, "create", "no")))
    with pytest.raises(ConfigError) as caught:
        loaded("name: a\nnodes: 1\ntransport: shm\n", facts)
    assert str(caught.value).startswith(f"{tmp_path}/a.yaml:3: transport: shm will not work here: sealed memory ")
    with pytest.raises(ConfigError) as caught:
        loaded("name: a\n", facts, "transport=shm")
    assert str(caught.value).startswith("--set: transport: shm will not work here: ")
