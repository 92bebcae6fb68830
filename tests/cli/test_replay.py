"""`tensorferry replay` and `submit` run against a fake deployment: options, exit status, files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import structlog
from click.testing import CliRunner, Result

from tensorferry.cli import submit
from tensorferry.cli.main import main
from tensorferry.codecs import messages as wire
from tensorferry.pipeline.client import prompt_parts as pieces
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.supervisor import Supervisor

DATA = Path(__file__).parents[1] / "data" / "traces"
LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"


@pytest.fixture(autouse=True)
def log_as_it_was() -> Any:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


class FakeClient:
    """A client that fails the requests whose number is in `bad`."""

    def __init__(self, bad: Sequence[int]) -> None:
        self.bad, self.parts = bad, list[Sequence[object]]()

    def submit_nowait(
        self, parts: Sequence[object], *, output_tokens: int, deadline_s: float, request: bytes
    ) -> asyncio.Future[wire.Result | wire.Busy]:
        self.parts.append(parts)
        reply: asyncio.Future[wire.Result | wire.Busy] = asyncio.get_running_loop().create_future()
        if len(self.parts) - 1 in self.bad:
            reply.set_result(wire.Busy(request, 0, 100, "full"))
        else:
            item = wire.ItemReport(0, (1, 4, 4), 4, "shm", 100, b"")
            reply.set_result(wire.Result(request, 0, 54, output_tokens, (item,), ()))
        return reply

    def cancel(self, request: bytes) -> None:
        raise AssertionError("nothing to cancel")

    async def refresh(self, timeout_s: float = 5.0) -> list[wire.Member]:
        return []


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The deployment that the command starts and connects to. `bad` names the requests that fail."""
    state: dict[str, Any] = {"bad": (), "started": 0}

    @asynccontextmanager
    async def running(deployment: Deployment, file: Path, settings: Sequence[str]) -> AsyncIterator[None]:
        state.update(settings=settings, started=state["started"] + 1)
        yield

    @asynccontextmanager
    async def connect(deployment: Deployment, *, timeout_s: float) -> AsyncIterator[FakeClient]:
        state.update(deployment=deployment, client=FakeClient(state["bad"]))
        yield state["client"]

    monkeypatch.setattr(Supervisor, "running", running)
    monkeypatch.setattr(Client, "connect", connect)
    return state


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def replayed(trace: str, *options: str | Path) -> Result:
    quick = ("--set", "timeouts.heartbeat_s=0.01")
    return run("replay", DATA / trace, "--config", LOCAL, "--speed", "max", *quick, *options)


@pytest.mark.parametrize(("bad", "status"), [((), 0), ((2,), 3), (range(6), 4)])
def test_exit_status_and_files(deployment: dict[str, Any], tmp_path: Path, bad: Sequence[int], status: int) -> None:
    deployment["bad"] = bad
    result = replayed("servegen.jsonl", "--out", tmp_path / "out")
    assert result.exit_code == status, result.output
    requests = json.loads((tmp_path / "out" / "summary.json").read_text())["requests"]
    assert requests["read"] == requests["sent"] + requests["dropped"] == 6
    assert requests["sent"] == requests["ok"] + requests["failed"]
    assert requests["failed"] == len(bad)
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 6
    assert f"{6 - len(bad)} ok + {len(bad)} failed" in result.stdout


def test_the_images_fit_the_deployments_processor(deployment: dict[str, Any]) -> None:
    result = replayed("servegen.jsonl", "--limit", "2")
    assert "another number of tokens" not in result.stdout
    assert [len(parts) for parts in deployment["client"].parts] == [2, 2]  # an image and the text
    assert "2 read = 2 sent" in result.stdout


def test_progress_goes_to_stderr_and_the_report_to_stdout(deployment: dict[str, Any]) -> None:
    result = replayed("servegen.jsonl")
    assert "requests done: 6 of 6" in result.stderr
    assert "requests done" not in result.stdout


@pytest.mark.slow
def test_a_deployment_started_for_a_replay_logs_no_line_per_request(deployment: dict[str, Any]) -> None:
    replayed("servegen.jsonl")
    assert deployment["settings"][-1] == "telemetry.log_level=warning"
    assert deployment["deployment"].telemetry.log_level == "warning"
    replayed("servegen.jsonl", "--set", "telemetry.log_level=info")
    assert deployment["deployment"].telemetry.log_level == "info"
    replayed("servegen.jsonl", "--attach")
    assert deployment["started"] == 2, "an attached replay starts nothing"
    assert deployment["deployment"].telemetry.log_level == "info"


@pytest.mark.slow
def test_a_folder_for_the_report_is_made_once_the_trace_is_accepted(deployment: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "not-a-trace").write_text("hello\n")
    out = tmp_path / "deep" / "out"
    assert replayed(str(tmp_path / "not-a-trace"), "--out", out).exit_code == 1
    assert replayed("servegen.jsonl", "--start", "900h", "--dry-run", "--out", out).exit_code == 1
    assert replayed("servegen.jsonl", "--image-model", "nonsense", "--out", out).exit_code == 2
    assert not out.parent.exists()
    assert replayed("servegen.jsonl", "--out", out).exit_code == 0
    assert (out / "summary.json").exists()


def test_a_folder_that_cannot_be_made_is_said_before_the_run(deployment: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out")):
        result = replayed("servegen.jsonl", "--out", out)
        assert (result.exit_code, str(out) in result.stderr) == (2, True), result.output
    assert "client" not in deployment


def test_rows_that_are_all_broken_start_nothing_and_are_reported(deployment: dict[str, Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n")
    result = replayed(str(trace), "--out", tmp_path / "out")
    assert result.exit_code == 4
    assert "1 read = 0 sent + 1 dropped" in result.stdout
    assert "client" not in deployment
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["requests"]["dropped"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--speed", "fast"), "neither a number, a fraction such as 1/3, nor max"),
        (("--speed", "0"), "not between"),
        (("--concurrency", "0"), "--concurrency"),
        (("--limit", "-1"), "--limit"),
        (("--images", "absent"), "absent"),
        (("--set", "pool.budget=3"), "pool.budget"),
        (("--out", "/proc/nowhere"), "--out"),
        (("--rate", "-3"), "--rate"),
        (("--parallel", "3"), "--parallel"),
    ],
)
def test_wrong_usage_is_status_2(deployment: dict[str, Any], options: Sequence[str], said: str) -> None:
    result = replayed("servegen.jsonl", *options)
    assert result.exit_code == 2
    assert said in result.output
    assert "client" not in deployment


def test_a_file_that_is_no_trace_is_one_sentence(deployment: dict[str, Any]) -> None:
    result = replayed("azure_lmm.truncated.csv.gz")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "ends early" in result.stderr
    assert replayed("absent.jsonl").exit_code == 2


# --- submit ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The parts that `submit` sent. `outcome` is the answer that it gets."""
    request = bytes(16)
    item = wire.ItemReport(2, (1, 4, 6), 6, "shm", 9000, bytes(range(16)))
    marks = (wire.Mark("received", 1_000_000), wire.Mark("answered", 13_500_000))
    state: dict[str, Any] = {"outcome": wire.Result(request, 0, 20, 16, (item,), marks)}

    class Submitting:
        async def submit(
            self, parts: Sequence[pieces.Part], *, output_tokens: int, deadline_s: float
        ) -> wire.Result | wire.Failed | wire.Busy:
            state["parts"] = parts
            outcome: wire.Result | wire.Failed | wire.Busy = state["outcome"]
            return outcome

    @asynccontextmanager
    async def connect(deployment: Deployment, *, timeout_s: float) -> AsyncIterator[Submitting]:
        yield Submitting()

    monkeypatch.setattr(Client, "connect", connect)
    return state


def test_parts_are_sent_in_the_order_they_were_given(sent: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"A")
    (tmp_path / "b.jpg").write_bytes(b"B")
    a, b = tmp_path / "a.jpg", tmp_path / "b.jpg"
    given = ["--text", "one", "--image", b, "--config", LOCAL, "--video", a, f"--image={a}", "--text", "two"]
    result = run("submit", *given)
    assert sent["parts"] == ["one", pieces.Image(b), pieces.Video(a), pieces.Image(a), "two"]
    assert result.exit_code == 0
    for part in ("20 tokens in, 16 out, 12.5 ms", "1 x 4 x 6", "shm", "9000", "000102030405"):
        assert part in result.output, part


def test_a_request_that_is_not_served_is_status_3(sent: dict[str, Any]) -> None:
    failure = wire.Failure("BadItem", "item 0: [b]truncated[/b]", wire.Origin("tokenizer", 0, 1), 0)
    sent["outcome"] = wire.Failed(bytes(16), 0, failure)
    result = run("submit", "--text", "x", "--config", LOCAL)
    assert (result.exit_code, result.output) == (3, "failed: BadItem: item 0: [b]truncated[/b]\n")
    sent["outcome"] = wire.Busy(bytes(16), 0, 200, "256 requests in flight")
    result = run("submit", "--text", "x", "--config", LOCAL)
    assert (result.exit_code, result.output) == (3, "busy: 256 requests in flight; try again in 200 ms\n")


def test_submit_needs_something_to_send(sent: dict[str, Any]) -> None:
    assert run("submit", "--config", LOCAL).exit_code == 2
    assert run("submit", "--config", LOCAL, "--image", "absent.jpg").exit_code == 2
    assert "Usage" in run("submit", "--help").output
    assert isinstance(submit.command, click.Command)


# --- which part of which trace -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_window_is_replayed_from_its_own_first_request(deployment: dict[str, Any], tmp_path: Path) -> None:
    """Duty 7 of a faithful replay: times are rebased after the window is cut."""
    result = replayed("azure_lmm.csv", "--start", "5.6s", "--end", "2024-10-15T12:00:07.4Z", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["requests"]["read"], summary["requests"]["sent"], summary["trace"]["outside"]) == (2, 2, 8)
    assert summary["trace"]["origin"] == "2024-10-15 12:00:06.513"
    assert "8 rows outside --start and --end" in result.stdout
    assert [json.loads(line)["at_ms"] for line in (tmp_path / "results.jsonl").read_text().splitlines()] == [0, 819]


def test_a_window_of_dates_needs_a_trace_of_dates(deployment: dict[str, Any]) -> None:
    result = replayed("mooncake.jsonl", "--start", "2024-10-15 12:00:00")
    assert result.exit_code == 1
    assert "no dates" in result.stderr
    assert replayed("mooncake.jsonl", "--start", "tomorrow").exit_code == 2


def test_a_trace_without_times_needs_a_rate_or_no_schedule(deployment: dict[str, Any], tmp_path: Path) -> None:
    trace = tmp_path / "batch.jsonl"
    trace.write_text('{"custom_id": "a", "body": {"prompt": "x"}}\n' * 2)
    result = run("replay", trace, "--config", LOCAL)
    assert result.exit_code == 1
    assert "--rate" in result.stderr
    assert replayed(str(trace)).exit_code == 0
    result = run("replay", trace, "--config", LOCAL, "--rate", "50", "--set", "timeouts.heartbeat_s=0.01")
    assert result.exit_code == 0
    assert "all times: 50 requests a second, evenly" in result.stdout
    assert "2 requests: output length, 128 tokens" in result.stdout


def test_a_rate_is_refused_where_the_trace_has_times(deployment: dict[str, Any]) -> None:
    """Other tools ignore the rate silently, and call the result a run at that rate."""
    result = replayed("servegen.jsonl", "--rate", "3")
    assert result.exit_code == 1
    assert "times of its own" in result.stderr


def test_recorded_failures_can_be_left_out(deployment: dict[str, Any], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"at_ms": 0, "text": "a", "output_tokens": 0}\n{"at_ms": 1, "text": "b", "output_tokens": 1}\n')
    assert "2 read = 2 sent" in replayed(str(trace)).stdout
    assert "1 x recorded_failure" in replayed(str(trace), "--failures", "drop").stdout


def test_keys_read_what_no_content_could_tell(deployment: dict[str, Any], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"t": 19440110.5, "in": 70, "out": 3}\n')
    assert replayed(str(trace)).exit_code == 1
    assert replayed(str(trace), "--keys", "time=t,prompt=in,output=out,unit=s").exit_code == 0
    for wrong in (
        "time",
        "time=t,when=x",
        "time=t,unit=h",
        "unit=s,block_tokens=x",
        "unit=0",
        "unit=inf",
        "unit=nan",
        "unit=1e999999",
    ):
        assert replayed(str(trace), "--keys", wrong).exit_code == 2, wrong


def test_a_dry_run_says_what_would_be_sent_and_starts_nothing(deployment: dict[str, Any]) -> None:
    result = run("replay", DATA / "azure_lmm.csv", "--config", LOCAL, "--dry-run", "--end", "60s")
    assert result.exit_code == 0, result.output
    for part in ("starts at 2024-10-15 12:00:00.269, spans 7.297 s", "5 read = 5 to send + 0 dropped", "payload"):
        assert part in result.stdout, part
    assert "client" not in deployment
    assert run("replay", DATA / "azure_lmm.csv", "--config", LOCAL, "--dry-run", "--end", "60s").stdout == result.stdout


@pytest.mark.slow
def test_the_way_of_later_turns_is_said(deployment: dict[str, Any], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    turns = [{"text": "a", "timestamp": 0}, {"text": "b", "delay": 1}]
    trace.write_text(json.dumps({"session_id": "s", "turns": turns}) + "\n")
    assert "think: 1 turns their think time after that answer" in replayed(str(trace)).stdout
    assert "wait: 1 turns" in replayed(str(trace), "--sessions", "wait").stdout
    result = replayed(str(trace), "--sessions", "clock", "--out", tmp_path / "out")
    assert "1 turns" not in result.stdout
    run_summary = json.loads((tmp_path / "out" / "summary.json").read_text())["run"]
    assert (run_summary["sessions"], run_summary["following"]) == ("clock", 0)


def test_strictly_rows_out_of_order_stop_a_run_before_it_starts(deployment: dict[str, Any]) -> None:
    result = replayed("azure_2023.shuffled.csv", "--strict")
    assert result.exit_code == 1
    assert "earlier than the row before it" in result.stderr
    assert "client" not in deployment


@pytest.mark.slow
def test_the_image_model_is_chosen_and_said(deployment: dict[str, Any]) -> None:
    assert "22 images: size and picture (the trace has only their number), sizes as modserve" in " ".join(
        replayed("azure_lmm.csv").stdout.split()
    )
    assert "sizes as 64x48" in " ".join(replayed("azure_lmm.csv", "--image-model", "64x48").stdout.split())
    result = replayed("azure_lmm.csv", "--image-model", "imagenet")
    assert (result.exit_code, "--image-model" in result.output) == (2, True)
