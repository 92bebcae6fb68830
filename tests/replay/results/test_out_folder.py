"""The folder of --out is made and replaced as a whole, and only results of tensorferry are removed."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorferry.cli.main import main
from tensorferry.cli.report import write_pages
from tensorferry.codecs.errors import OutputError, ReportError
from tensorferry.replay.results import out_folder
from tensorferry.replay.results import result_folder as reading
from tensorferry.replay.results.comparison import find_runs
from tensorferry.replay.results.out_folder import Proof, filled, require_free
from tensorferry.replay.results.result_folder import read_run

MakeRun = Callable[..., Path]
DATA = Path(__file__).parents[2] / "data" / "traces"
LOCAL = Path(__file__).parents[3] / "configs" / "local-fingerprint.yaml"
TRACE = DATA / "servegen.jsonl"


def cli(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def planned(out: Path, *options: str) -> Result:
    """Make a dry run, which writes to --out as a replay does."""
    return cli("replay", TRACE, "--config", LOCAL, "--dry-run", "--out", out, *options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def a_sweep(make_run: MakeRun, folder: Path) -> Path:
    make_run(folder / "01" / "1")
    (folder / "01" / "1.log").write_text("said\n")
    (folder / "01" / "2.log").write_text("could not be run\n")
    (folder / "sweep.json").write_text('{"tensorferry": "0.1.0"}')
    (folder / "compare.html").write_text("<html>")
    return folder


# --- refused ------------------------------------------------------------------------------------------------------


def test_an_occupied_folder_is_refused_before_anything_is_read(make_run: MakeRun, tmp_path: Path) -> None:
    out = make_run(tmp_path / "out")
    before = contents(out)
    result = planned(out)
    assert result.exit_code == 2, result.output
    assert f"{out}: it is not empty; name a new folder, or replace its results by --overwrite" in result.stderr
    assert contents(out) == before
    result = cli("replay", TRACE, "--config", "absent.yaml", "--out", out)
    assert "it is not empty" in result.stderr


@pytest.mark.parametrize(("command", "options"), [("replay", ["--dry-run"]), ("sweep", ["--set", "encoder.ranks=1"])])
@pytest.mark.parametrize("name", ["notes.txt", ".git", "01/1/notes.txt", "2024/report.html"])
def test_a_folder_with_anything_else_in_it_is_never_replaced(
    make_run: MakeRun, tmp_path: Path, command: str, options: list[str], name: str
) -> None:
    out = make_run(tmp_path / "out") if command == "replay" else a_sweep(make_run, tmp_path / "out")
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("mine")
    before = contents(out)
    result = cli(command, TRACE, "--config", LOCAL, "--out", out, "--overwrite", *options)
    assert result.exit_code == 2, result.output
    assert "which tensorferry did not write, so it is not replaced; name another folder" in result.stderr
    assert contents(out) == before


@pytest.mark.parametrize("proof", ["summary.json", "sweep.json"])
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"report.html": "x"}, "it has no "),
        ({"summary.json": "{}", "sweep.json": "{}"}, "is not one of tensorferry's"),
        ({"summary.json": '{"tensorferry": "0.1.0"}', "sweep.json": '{"tensorferry": "0.1.0"}'}, "it has s"),
    ],
)
def test_what_is_not_known_for_ours_is_not_replaced(
    tmp_path: Path, proof: Proof, files: dict[str, str], said: str
) -> None:
    """In the third case a run is not replaced by a sweep, nor a sweep by a run."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(OutputError, match=said):
        require_free(tmp_path, proof, overwrite=True)


def test_a_link_in_a_folder_is_not_ours(make_run: MakeRun, tmp_path: Path) -> None:
    out = make_run(tmp_path / "out")
    (out / "report.html").symlink_to(tmp_path)
    with pytest.raises(OutputError, match=r"it has report\.html"):
        require_free(out, "summary.json", overwrite=True)


def test_a_folder_of_runs_is_no_run(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path / "out" / "1")
    with pytest.raises(OutputError, match=r"it has no sweep\.json"):
        require_free(tmp_path / "out", "sweep.json", overwrite=True)


@pytest.mark.processes
def test_a_sweep_that_still_runs_is_not_replaced(make_run: MakeRun, tmp_path: Path) -> None:
    """A killed sweep whose replay still runs is not replaced, since the replay would write into the new one."""
    out = a_sweep(make_run, tmp_path / "out")
    with out_folder.in_use(out, "sweep.json") as descriptor:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(descriptor,))
    with child:
        result = cli("sweep", TRACE, "--config", LOCAL, "--out", out, "--overwrite")
        assert (result.exit_code, "another command still writes to it" in result.stderr) == (2, True), result.output
        child.communicate(timeout=30)
    require_free(out, "sweep.json", overwrite=True)


def test_the_folder_a_command_runs_in_is_not_replaced(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run(tmp_path / "out"))
    result = planned(Path(), "--overwrite")
    assert (result.exit_code, "this command runs in it" in result.stderr) == (2, True), result.output


def test_a_mounted_file_system_is_refused_with_a_folder_in_it() -> None:
    with pytest.raises(OutputError, match=r"a file system is mounted there.*such as /dev/shm/run"):
        require_free(Path("/dev/shm"), "summary.json", overwrite=True)


def test_overwriting_needs_a_folder() -> None:
    result = cli("replay", TRACE, "--config", LOCAL, "--overwrite", "--dry-run")
    assert (result.exit_code, "--out" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("name", ["summary.json", "results.jsonl", "report.html"])
@pytest.mark.parametrize("command", ["compare", "plan"])
def test_a_page_takes_no_file_of_a_run(make_run: MakeRun, tmp_path: Path, name: str, command: str) -> None:
    out = make_run(tmp_path / "out")
    asked = ["compare", out] if command == "compare" else ["plan", TRACE, "--config", LOCAL, "--measured", out]
    before = contents(out)
    result = cli(*asked, "--html", out / name)
    assert (result.exit_code, f"belongs to the run in {out}" in result.stderr) == (2, True), result.output
    assert contents(out) == before


# --- replaced whole -----------------------------------------------------------------------------------------------


def test_overwriting_leaves_nothing_of_the_former_run(make_run: MakeRun, tmp_path: Path) -> None:
    """That holds even if the new run has no page, since an old page beside new numbers would mislead."""
    out = make_run(tmp_path / "out")
    (out / "report.html").write_text("the old page")
    out.chmod(0o750)
    assert planned(out, "--overwrite").exit_code == 0
    assert sorted(contents(out)) == ["gauges.jsonl", "results.jsonl", "summary.json"]
    assert json.loads((out / "summary.json").read_text())["requests"]["read"] == 6
    assert out.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["out"]


def test_a_sweep_replaces_a_sweep(make_run: MakeRun, tmp_path: Path) -> None:
    out = a_sweep(make_run, tmp_path / "out")
    (out / "01" / ".tensorferry-0123456789ab").mkdir()  # of a run that was killed
    with filled(out, "sweep.json", overwrite=True) as made:
        (made / "sweep.json").write_text("new")
    assert contents(out) == {"sweep.json": b"new"}


def test_a_link_stays_one_and_what_it_points_to_is_replaced(make_run: MakeRun, tmp_path: Path) -> None:
    out = make_run(tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    assert planned(tmp_path / "link", "--overwrite").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((out / "summary.json").read_text())["requests"]["read"] == 6


@pytest.mark.parametrize("exchanges", [True, False])
def test_nobody_finds_a_part_of_a_folder(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """That holds even if a file system cannot exchange two names."""
    if not exchanges:

        class Libc:
            @staticmethod
            def renameat2(*_: object) -> int:
                ctypes.set_errno(errno.EINVAL)
                return -1

        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Libc)
    out = make_run(tmp_path / "out")
    before = contents(out)
    with filled(out, "summary.json", overwrite=True) as made:
        (made / "results.jsonl").write_text("new")
        assert contents(out) == before
        (made / "summary.json").write_text("new")
        assert contents(out) == before
    assert contents(out) == {"results.jsonl": b"new", "summary.json": b"new"}
    assert os.listdir(tmp_path) == ["out"]


def test_without_its_numbers_a_folder_does_not_come_to_be(make_run: MakeRun, tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        with filled(out, "summary.json", overwrite=True) as made:
            (made / "results.jsonl").write_text("new")
            raise OSError(errno.ENOSPC, "full")

    out = make_run(tmp_path / "out")
    before = contents(out)
    for folder in (out, tmp_path / "other"):
        with pytest.raises(OSError, match="full"):
            fail(folder)
    assert contents(out) == before
    assert os.listdir(tmp_path) == ["out"]


def test_numbers_come_into_their_place_though_the_page_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with filled(tmp_path / "out", "summary.json", overwrite=False) as made:
            (made / "summary.json").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert contents(tmp_path) == {"out/summary.json": b"new"}


def test_of_two_runs_into_one_folder_both_are_kept(tmp_path: Path) -> None:
    def write(name: str) -> None:
        with filled(tmp_path / "out", "summary.json", overwrite=False) as made:
            (made / "summary.json").write_text(name)
            if name == "late":
                write("early")

    with pytest.raises(OutputError, match=r"not empty.*The new results are in ") as caught:
        write("late")
    assert (tmp_path / "out" / "summary.json").read_text() == "early"
    kept = Path(caught.value.problem.rpartition(" ")[2])
    assert (kept / "summary.json").read_text() == "late"


def test_what_was_put_into_the_folder_meanwhile_is_kept(make_run: MakeRun, tmp_path: Path) -> None:
    def write() -> None:
        with filled(out, "summary.json", overwrite=True) as made:
            (made / "summary.json").write_text("new")
            (out / "notes.txt").write_text("mine")

    out = make_run(tmp_path / "out")
    with pytest.raises(OutputError, match=r"it has notes\.txt.*The new results are in "):
        write()
    assert (out / "notes.txt").read_text() == "mine"


# --- read whole ---------------------------------------------------------------------------------------------------


def test_a_run_is_read_whole_while_another_replaces_it(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is exchanged once the summary has been read. Both have as many requests, so counts tell nothing."""
    out, other = make_run(tmp_path / "out", [10, 20]), make_run(tmp_path / "other", [500, 600])
    decoder = reading.msgspec.json.Decoder

    def and_replace(kind: type) -> object:
        if kind is reading.Row and other.exists():
            out.rename(tmp_path / "former")
            other.rename(out)
        return decoder(kind)

    monkeypatch.setattr(reading.msgspec.json, "Decoder", and_replace)
    run = read_run(out)
    assert [row.done_ms - row.sent_ms for row in run.rows] == [10, 20]
    assert run.summary.latency_ms.from_sent is not None
    assert run.summary.latency_ms.from_sent.max == 20


@pytest.mark.usefixtures("plots")
def test_pages_of_a_run_are_not_put_beside_another(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, other = make_run(tmp_path / "out", [10, 20]), make_run(tmp_path / "other", [500, 600])
    module = sys.modules["tensorferry.cli.report"]

    def drawn(run: reading.Run) -> bytes:
        out.rename(tmp_path / "former")
        other.rename(out)
        return b"the old page"

    monkeypatch.setattr(module, "report", drawn)
    before = contents(other)
    with pytest.raises(ReportError, match="another run has replaced it meanwhile"):
        write_pages(out)
    assert contents(out) == before


def test_what_a_killed_run_left_is_not_compared(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path / "1")
    make_run(tmp_path / ".tensorferry-0123456789ab")
    assert [run.folder.name for run in find_runs([tmp_path])] == ["1"]
