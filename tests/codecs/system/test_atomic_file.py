"""What is written appears whole, where it was asked for, or not at all; and no trace, device or link is lost to it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorferry.cli.main import main
from tensorferry.codecs.errors import OutputError
from tensorferry.codecs.system import atomic_file
from tensorferry.codecs.system.atomic_file import destination, write_whole

TRACE = Path(__file__).parents[2] / "data" / "traces" / "servegen.jsonl"


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(params=["nameless", "named"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a file comes to be: some file systems know no files without a name."""
    if request.param == "named":
        really = os.open

        def refusing(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return really(path, flags, *rest, dir_fd=dir_fd)

        monkeypatch.setattr(atomic_file.os, "open", refusing)
    return str(request.param)


def test_a_file_appears_or_is_replaced(way: str, tmp_path: Path) -> None:
    out = tmp_path / ("x" * 255)
    for content in (b"one", b"two"):
        write_whole(out, [content, b"!"])
        assert out.read_bytes() == content + b"!"
    assert list(tmp_path.iterdir()) == [out]
    assert out.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_fails_on_the_way_leaves_what_was_there(way: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise KeyError("stop")

    with pytest.raises(KeyError):
        write_whole(out, chunks())
    assert out.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_link_stays_one_and_its_file_is_written(way: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("deep/file")
    (tmp_path / "deep").mkdir()
    for content in (b"new", b"newer"):
        write_whole(tmp_path / "link", [content])
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "deep" / "file").read_bytes() == content


@pytest.mark.parametrize("command", ["convert", "cut"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pipe", "not a regular file"),
        ("to_pipe", "not a regular file"),
        ("socket", "not a regular file"),
        ("circle", "symbolic links"),
        ("nodir/x", "No such file or directory"),
        ("file/x", "Not a directory"),
        ("to_nowhere", "No such file or directory"),
        ("x" * 256, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_said_and_stays(tmp_path: Path, command: str, name: str, said: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "socket", 0o140600)
    (tmp_path / "file").write_bytes(b"old")
    for link, target in (("to_pipe", "pipe"), ("circle", "circle"), ("to_nowhere", "nodir/x")):
        (tmp_path / link).symlink_to(target)
    before = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    result = run("trace", command, TRACE, tmp_path / name)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: Invalid value for 'OUT': ")
    assert f"{name}: " in result.stderr
    assert said in result.stderr
    assert {path.name: path.lstat().st_mode for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("out", ["/dev/null", "/dev/full", "/dev/zero"])
def test_a_device_is_no_place_for_a_file(out: str) -> None:
    """Asked, not written to: as root, a fault here would cost the machine its device."""
    with pytest.raises(OutputError, match=f"{out}: not a regular file"):
        destination(Path(out))


def test_a_file_that_has_lost_its_name_is_no_place_for_a_file(tmp_path: Path) -> None:
    """As /dev/stdout may be."""
    with (tmp_path / "gone").open("w") as file:
        (tmp_path / "gone").unlink()
        with pytest.raises(OutputError, match="has no name any more"):
            destination(Path(f"/proc/self/fd/{file.fileno()}"))


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file.os, "replace", full)
    result = run("trace", "convert", TRACE, tmp_path / "out")
    assert (result.exit_code, result.stderr) == (2, f"Error: {tmp_path / 'out'}: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["convert", "cut"])
@pytest.mark.parametrize("out", ["t.jsonl", "hard", "soft", "folder"])
def test_a_trace_is_not_replaced_by_a_copy_of_it(tmp_path: Path, command: str, out: str) -> None:
    trace = tmp_path / "parts" / "t.jsonl"
    trace.parent.mkdir()
    shutil.copy(TRACE, trace)
    (tmp_path / "hard").hardlink_to(trace)
    (tmp_path / "soft").symlink_to(trace)
    source, target = (trace.parent, trace) if out == "folder" else (trace, tmp_path / out)
    result = run("trace", command, source, trace if out == "t.jsonl" else target)
    assert result.exit_code == 2
    assert "the trace itself" in result.stderr
    assert trace.read_bytes() == TRACE.read_bytes()


def test_a_linked_summary_stays_linked(tmp_path: Path) -> None:
    (tmp_path / "summary.json").symlink_to("elsewhere")
    write_whole(tmp_path / "summary.json", [b"{}"])
    assert (tmp_path / "elsewhere").read_bytes() == b"{}"


@pytest.mark.processes
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_killed_writer_leaves_nothing(tmp_path: Path, by: signal.Signals) -> None:
    program = """if True:
        import pathlib, signal, sys
        from tensorferry.codecs.system.atomic_file import write_whole
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
        def chunks():
            yield b"half"
            print("half", flush=True)
            sys.stdin.read()
        write_whole(pathlib.Path(sys.argv[1]), chunks())
    """
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "out")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        child.send_signal(by)
        assert child.wait(60) == -by
    assert list(tmp_path.iterdir()) == []
