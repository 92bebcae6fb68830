"""How a decision about transports is logged, and reaches the stages; see `test_transport.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.codecs.machine.machine_facts import (
    ALL,
    CPU_ONLY,
    EMBEDDINGS,
    FEATURES,
    IPC_FAULTS,
    NO_DRIVER,
    ONE_H200,
    RACK,
    TWO_H200,
    host,
)

from tensorferry.cli import transport as cli_transport
from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.machine import transport as policy
from tensorferry.codecs.machine.facts import Facts, Trial
from tensorferry.codecs.machine.transport import (
    Budget,
    Wanted,
    decide,
    startup_fields,
)
from tensorferry.pipeline.deployment.spec import Deployment, EncoderSpec, SchedulerSpec

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
    from tensorferry.pipeline.deployment.spec import ModelSpec, tokenizer_pool_nbytes

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
def test_p7_the_settings_that_reach_the_policy(keys: dict[str, Any], wanted: Wanted) -> None:
    assert cli_transport.wanted_by(Deployment(name="a", **keys)) == wanted


# --- from file to decision


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Deployment, tuple[str, ...]]]:
    """`load_to_run` of a file with this text, on a machine with these facts."""

    def load(text: str, facts: Facts, *settings: str) -> tuple[Deployment, tuple[str, ...]]:
        monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: facts)
        monkeypatch.setattr(cli_transport.logs, "configure", lambda spec, **bound: None)
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


def test_gpus_that_are_not_used_are_logged(settled) -> None:
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
