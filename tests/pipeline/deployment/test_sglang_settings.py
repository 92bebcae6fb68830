"""P6: settings of other systems are taken where nothing else is said, told of, and never win over our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from tensorferry.cli import transport as cli_transport
from tensorferry.cli.main import main
from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.machine.facts import CudaFacts, Facts
from tensorferry.pipeline.deployment.load import load, resolved
from tensorferry.pipeline.deployment.sglang_settings import ALIASES, Deprecation
from tensorferry.pipeline.deployment.spec import Deployment

IPC = "SGLANG_USE_CUDA_IPC_TRANSPORT"
CACHE = "SGLANG_MM_FEATURE_CACHE_MB"
HANDLES = "SGLANG_USE_IPC_POOL_HANDLE_CACHE"
RECYCLE = "SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC"

Loaded = tuple[Deployment, list[Deprecation]]


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Loaded]:
    """The deployment of a file with this text in this environment, and what was told."""

    def loaded(text: str, environ: dict[str, str] | None = None, *settings: str) -> Loaded:
        file = tmp_path / "a.yaml"
        file.write_text("name: a\n" + text)
        told: list[Deprecation] = []
        return load(file, settings, environ=environ or {}, tell=told.append), told

    return loaded


def test_p6_all_four_variables_are_known() -> None:
    assert set(ALIASES) == {IPC, CACHE, HANDLES, RECYCLE}


# --- keep_mm_feature_on_device


@pytest.mark.parametrize(
    ("text", "transport", "new", "outcome"),
    [
        ("keep_mm_feature_on_device: true\n", "cuda_ipc", "transport: cuda_ipc", "taken"),
        ("keep_mm_feature_on_device: true\nnodes: 2\n", "cuda_vmm", "transport: cuda_vmm", "taken"),
        ("keep_mm_feature_on_device: false\n", "auto", "transport: cpu or shm", "without effect"),
        (
            "keep_mm_feature_on_device: true\ntransport: cpu\n",
            "cpu",
            "transport: cuda_ipc",
            "overruled by transport: cpu",
        ),
        (
            "transport: auto\nkeep_mm_feature_on_device: true\n",
            "auto",
            "transport: cuda_ipc",
            "overruled by transport: auto",
        ),
        ("keep_mm_feature_on_device: true\ntransport: cuda_ipc\n", "cuda_ipc", "transport: cuda_ipc", "without effect"),
        (
            "keep_mm_feature_on_device: false\ntransport: cuda_vmm\n",
            "cuda_vmm",
            "transport: cpu or shm",
            "without effect",
        ),
    ],
)
def test_p6_keep_mm_feature_on_device_names_a_gpu_transport(loaded, text, transport, new, outcome) -> None:
    deployment, (told,) = loaded(text)
    assert deployment.transport == transport
    assert (told.new, told.outcome) == (new, outcome)
    assert told.old in text
    assert "keep_mm" not in resolved(deployment)


def test_p6_keep_mm_feature_on_device_is_an_error_beside_cuda_vmm(loaded, tmp_path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("transport: cuda_vmm\nkeep_mm_feature_on_device: true\n")
    assert str(caught.value) == (
        f"{tmp_path}/a.yaml:3: keep_mm_feature_on_device: is deprecated, and means nothing beside transport: cuda_vmm; "
        "remove it"
    )


def test_p6_keep_mm_feature_on_device_is_true_or_false(loaded) -> None:
    with pytest.raises(ConfigError, match=r":2: keep_mm_feature_on_device: expected true or false, got 1; or leave"):
        loaded("keep_mm_feature_on_device: 1\n")


def test_p6_keep_mm_feature_on_device_may_be_a_setting(loaded) -> None:
    deployment, (told,) = loaded("", None, "keep_mm_feature_on_device=true")
    assert (deployment.transport, told.outcome) == ("cuda_ipc", "taken")


def test_p6_what_it_leads_to_is_blamed_on_it(loaded) -> None:
    """cuda_ipc is not there yet, or does not work: the line is the old key's."""
    with pytest.raises(ConfigError) as caught:
        loaded("pp_size: 2\nnodes: 2\nkeep_mm_feature_on_device: true\n")
    assert caught.value.line == 4


# --- the environment


@pytest.mark.parametrize(
    ("name", "value", "keys", "found"),
    [
        (IPC, "1", ("transport",), "cuda_ipc"),
        (IPC, "true", ("transport",), "cuda_ipc"),
        (IPC, "YES", ("transport",), "cuda_ipc"),
        (CACHE, "512", ("pool", "budget_mb"), 512),
        (CACHE, " 512 ", ("pool", "budget_mb"), 512),
        (HANDLES, "0", ("pool", "handle_cache"), False),
        (HANDLES, "1", ("pool", "handle_cache"), True),
        (RECYCLE, "0.2", ("pool", "recycle_s"), 0.2),
        (RECYCLE, "2", ("pool", "recycle_s"), 2.0),
    ],
)
@pytest.mark.parametrize("text", ["", "pool: {slots: 8}\n"])
def test_p6_a_variable_is_an_alias(loaded, name, value, keys, found, text) -> None:
    deployment, (told,) = loaded(text, {name: value})
    part: Any = deployment
    for key in keys:
        part = getattr(part, key)
    assert part == found
    assert told.old == f"{name}={value.strip()}"
    assert told.new.startswith(f"{'.'.join(keys)}: ")
    assert told.outcome == "taken"
    assert deployment.pool.slots == (8 if text else 4096)


@pytest.mark.parametrize(
    ("name", "value", "text", "outcome"),
    [
        (IPC, "1", "transport: cpu\n", "overruled by transport: cpu"),
        (IPC, "1", "transport: cuda_vmm\n", "overruled by transport: cuda_vmm"),
        (IPC, "1", "transport: cuda_ipc\n", "without effect"),
        (CACHE, "512", "pool: {budget_mb: 64}\n", "overruled by pool.budget_mb: 64"),
        (CACHE, "64", "pool: {budget_mb: 64}\n", "without effect"),
        (HANDLES, "1", "pool: {handle_cache: false}\n", "overruled by pool.handle_cache: False"),
        (RECYCLE, "9", "pool: {recycle_s: 0.5}\n", "overruled by pool.recycle_s: 0.5"),
    ],
)
def test_p6_an_explicit_setting_wins_and_the_contradiction_is_told(loaded, name, value, text, outcome) -> None:
    deployment, (told,) = loaded(text, {name: value})
    assert deployment == loaded(text)[0]
    assert (told.old, told.outcome) == (f"{name}={value}", outcome)


def test_p6_a_setting_on_the_command_line_is_explicit_too(loaded) -> None:
    deployment, (told,) = loaded("", {CACHE: "512"}, "pool.budget_mb=64")
    assert deployment.pool.budget_mb == 64
    assert told.outcome == "overruled by pool.budget_mb: 64"


@pytest.mark.parametrize("value", ["0", "false", "No"])
def test_p6_an_ipc_switch_that_is_off_rules_nothing_out_and_says_so(loaded, value) -> None:
    deployment, (told,) = loaded("", {IPC: value})
    assert deployment.transport == "auto"
    assert (told.new, told.outcome) == ("transport: cpu or shm", "without effect")


def test_p6_both_kinds_together(loaded) -> None:
    deployment, told = loaded("keep_mm_feature_on_device: true\n", {IPC: "1", CACHE: "16"})
    assert (deployment.transport, deployment.pool.budget_mb) == ("cuda_ipc", 16)
    assert [one.outcome for one in told] == ["taken", "without effect", "taken"]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (IPC, "maybe", "expected 1 or 0, got maybe"),
        (HANDLES, "2", "expected 1 or 0, got 2"),
        (CACHE, "4g", "expected a whole number of MiB, got 4g"),
        (CACHE, "-1", "expected a whole number of MiB, got -1"),
        (CACHE, "\u0661", "expected a whole number"),
        (CACHE, "1" * 5000, "expected a whole number"),
        (RECYCLE, "soon", "expected seconds, got soon"),
        (RECYCLE, "nan", "expected seconds, got nan"),
        (RECYCLE, "inf", "expected seconds, got inf"),
    ],
)
def test_p6_nonsense_names_the_variable(loaded, name, value, problem) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("", {name: value})
    assert str(caught.value).startswith(f"environment: {name}: {problem}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("name", "value", "key"), [(CACHE, "0", "pool.budget_mb"), (RECYCLE, "0", "pool.recycle_s")])
def test_p6_a_value_out_of_range_is_blamed_on_the_variable(loaded, name, value, key) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("", {name: value})
    assert str(caught.value).startswith(f"environment variable {name}: {key}: expected ")


def test_p5_a_budget_by_variable_keeps_to_the_rules_of_one(loaded) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("tokenizer: {workers: 8}\n", {CACHE: "4"})
    assert caught.value.key == "pool.budget_mb"
    assert "4 MiB over 8 tokenizer.workers" in caught.value.problem


@pytest.mark.parametrize("text", ["pool: 5\n", "pool: null\n", "pool: []\n"])
def test_p6_a_section_that_is_none_is_still_refused_as_such(loaded, text) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml:2: pool: "):
        loaded(text, {CACHE: "4"})


def test_p6_an_empty_variable_is_none(loaded) -> None:
    assert loaded("", dict.fromkeys(ALIASES, " "))[1] == []


def test_nothing_reads_the_environment_below_the_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "512")
    file = tmp_path / "a.yaml"
    file.write_text("name: a\n")
    assert load(file).pool.budget_mb == 1024


# --- at the edge


def test_p6_config_check_notes_what_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "512")
    file = tmp_path / "a.yaml"
    file.write_text("name: a\nkeep_mm_feature_on_device: true\npool: {budget_mb: 64}\n")
    result = CliRunner().invoke(main, ["config", "check", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:3] == [
        "note: keep_mm_feature_on_device: true is deprecated, write transport: cuda_ipc in the deployment file (taken)",
        f"note: {CACHE}=512 is deprecated, write pool.budget_mb: 512 in the deployment file (overruled by "
        "pool.budget_mb: 64)",
    ]
    shown = CliRunner().invoke(main, ["config", "show", str(file)], catch_exceptions=False)
    assert "transport: cuda_ipc\n" in shown.stdout


def test_p6_the_log_of_a_start_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = cli_transport.gather({}, cuda=False)
    monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: Facts(facts.host, CudaFacts("none", True)))
    monkeypatch.setattr(cli_transport.logs, "configure", lambda spec, **bound: None)
    file = tmp_path / "a.yaml"
    file.write_text("name: a\ntransport: shm\n")
    with capture_logs() as logs:
        cli_transport.load_to_run(file, (), {IPC: "1", CACHE: "16"})
    assert [line for line in logs if line["event"] == "setting_deprecated"] == [
        {
            "event": "setting_deprecated",
            "log_level": "warning",
            "old": f"{IPC}=1",
            "new": "transport: cuda_ipc",
            "outcome": "overruled by transport: shm",
        },
        {
            "event": "setting_deprecated",
            "log_level": "warning",
            "old": f"{CACHE}=16",
            "new": "pool.budget_mb: 16",
            "outcome": "taken",
        },
    ]
