"""The policy of promises P1-P4 and P7: every branch of `decide`, every reason and remedy, and what the log says."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from tests.codecs.machine.machine_facts import (
    ALL,
    CPU_ONLY,
    EMBEDDINGS,
    FEATURES,
    GB200,
    H200,
    IPC_FAULTS,
    NO_DRIVER,
    NOT_PERMITTED,
    ONE_H200,
    RACK,
    WORKS,
    cuda,
    host,
)

from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.machine.facts import UNTRIED, CudaFacts, Facts, Gpu, Trial
from tensorferry.codecs.machine.transport import (
    AVAILABLE,
    TRANSPORTS,
    Wanted,
    decide,
    not_yet,
    obstacle,
    startup_fields,
)
from tensorferry.pipeline.deployment.load import require_available
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.stages.adapters.registry import BUILT_IN

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
    assert "CUDA was not looked for" in decision.refusals[0].reason


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


def test_gpus_that_cannot_be_used_after_a_step_down_are_named() -> None:
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


def test_p3_an_explicit_choice_is_taken_or_an_error_on_every_machine() -> None:
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
