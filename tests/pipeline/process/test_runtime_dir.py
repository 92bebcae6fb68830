"""Who owns a deployment's folder, and that two never do; with real processes, killed where it hurts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process import name_claim
from tensorferry.pipeline.process.runtime_dir import Runtime

DEADLINE_S = 20.0
LONG_NAME = "a deployment/with ünusual *letters* " * 5
STAGES = {"tokenizer": 255, "encoder": 1023, "scheduler": 65535}  #: and the largest rank of each

PRELUDE = """
import os, signal, socket, subprocess, sys, time
from tensorferry.codecs.errors import DeploymentError, PeerGone
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime
def say(*words): print(*words, flush=True)
runtime = Runtime.of(Deployment(name=sys.argv[1], runtime_dir=sys.argv[2]))
"""

#: Owns an encoder, with its sockets, until it is told to stop.
OWNER = """
with runtime.own("encoder", 3, "local.yaml"):
    sockets = []
    for address in (runtime.inbox("encoder", 3).removeprefix("ipc://"), runtime.broker("encoder", 3)):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(address)
    say("owned")
    sys.stdin.readline()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder whose path is short."""
    with tempfile.TemporaryDirectory(prefix="tf-") as made:
        yield Path(made)


@pytest.fixture
def runtime(base: Path) -> Runtime:
    return Runtime.of(Deployment(name="local", runtime_dir=str(base)))


@pytest.fixture
def child(may_start_processes: None, base: Path) -> Iterator[Start]:
    """child(code): a new process with the same runtime; killed at the end."""
    running: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, close_fds: bool = True) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), "local", str(base), *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, close_fds=close_fds)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> str:
    """The next line a child says."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0]
    return process.stdout.readline().rstrip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(DEADLINE_S)


def named(**given: str | None) -> Deployment:
    return Deployment(**{"name": "local", "runtime_dir": None} | given)  # type: ignore[arg-type]


def addresses(runtime: Runtime) -> list[str]:
    """Every address a deployment can have."""
    found = [runtime.front_door(255)]
    for stage, rank in STAGES.items():
        found += [runtime.inbox(stage, rank), runtime.inbox(stage, 0)]
        if stage != "scheduler":
            found.append(runtime.broker(stage, rank))
    return [address.removeprefix("ipc://") for address in found]


# --- addresses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", LONG_NAME, "模型" * 100, "..", "-", " ", "\ud800"])
@pytest.mark.parametrize("room", ["short", "longest"])
def test_b23_every_address_fits_and_can_be_bound(name, room, base):
    if room == "longest":
        base = base / ("b" * (71 - len(os.fsencode(base)) - 1))
        assert len(os.fsencode(base)) == 71
    runtime = Runtime.of(Deployment(name=name, runtime_dir=str(base)))
    runtime.prepare()
    bound = addresses(runtime)
    assert len(set(bound)) == len(bound)
    for address in bound:
        assert len(os.fsencode(address)) <= 107
        assert Path(address).parent == runtime.directory
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
    assert max(len(os.fsencode(address)) for address in bound) == 107 or room == "short"


def test_b23_an_explicit_folder_too_long_is_refused_with_the_numbers(base):
    path = base / ("b" * (72 - len(os.fsencode(base)) - 1))
    with pytest.raises(DeploymentError, match=r"has 72 bytes; at most 71 leave room.*shorter"):
        Runtime.of(named(runtime_dir=str(path)))
    with pytest.raises(DeploymentError, match=r"has \d+ bytes"):
        Runtime.of(named(runtime_dir=f"{base}/{'ä' * 30}"))  # counted in bytes
    with pytest.raises(DeploymentError, match="not an absolute path"):
        Runtime.of(named(runtime_dir="somewhere"))


def test_b23_deployments_with_names_that_begin_alike_do_not_meet(base):
    shared = "n" * 120
    found = {
        Runtime.of(Deployment(name=name, runtime_dir=str(base))).directory
        for name in (f"{shared}1", f"{shared}2", "a/b", "a-b", "a b", "A b", "ä b", "a")
    }
    assert len(found) == 8
    assert all(path.parent == base for path in found)


def test_a_name_can_be_read_in_its_folder(base):
    assert Runtime.of(Deployment(name="qwen3-vl, eu", runtime_dir=str(base))).directory.name.startswith("qwen3-vl-eu-")


def test_the_identity_is_the_name_alone(base):
    """Other settings may change under a running deployment's feet; its address may not."""
    one = Deployment(name="x", runtime_dir=str(base))
    other = Deployment(name="x", runtime_dir=str(base), transport="cpu", nodes=2)
    assert Runtime.of(one) == Runtime.of(other)


@pytest.mark.processes
def test_b23_both_ends_compute_the_same_whatever_tmpdir_is(base):
    code = """
    import sys
    from tensorferry.pipeline.deployment.spec import Deployment
    from tensorferry.pipeline.process.runtime_dir import Runtime
    print(Runtime.of(Deployment(name=sys.argv[1])).inbox("scheduler", 65535))
    """
    long = base / ("t" * 150)
    long.mkdir()
    heard = {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), LONG_NAME],
            env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(long)} | extra,
            capture_output=True,
            check=True,
            timeout=DEADLINE_S,
        ).stdout
        for extra in ({}, {"TMPDIR": str(long)}, {"TMPDIR": str(base), "HOME": "/", "LC_ALL": "C"})
    }
    assert len(heard) == 1
    assert heard.pop().startswith(f"ipc:///tmp/tensorferry-{os.getuid()}/".encode())


def test_the_xdg_folder_is_used_where_it_is_ours_and_short(base):
    fallback = Path(f"/tmp/tensorferry-{os.getuid()}")
    usual = Path(f"/run/user/{os.getuid()}")
    long = base / ("x" * 150)
    long.mkdir()

    def chosen(xdg: str | None) -> Path:
        return Runtime.of(named(), {} if xdg is None else {"XDG_RUNTIME_DIR": xdg}).directory.parent

    assert chosen(str(base)) == base / "tensorferry"
    for unusable in ("relative", str(long), str(base / "missing"), _foreign_folder(base), "/tmp/\udcff"):
        assert chosen(unusable) == fallback
    for unset in (None, ""):
        assert chosen(unset) == (usual / "tensorferry" if usual.is_dir() else fallback)


def _foreign_folder(base: Path) -> str:
    """A folder of another user."""
    if os.getuid():
        return "/usr"
    foreign = base / "foreign"
    foreign.mkdir(exist_ok=True)
    os.chown(foreign, 12345, 12345)
    return str(foreign)


def test_computing_addresses_touches_nothing(base, runtime):
    addresses(runtime)
    runtime.lock("encoder", 3)
    assert runtime.owner("encoder", 3) is None
    assert not list(base.iterdir())


# --- the folder -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o077])
def test_b28_the_folders_are_the_users_alone(base, umask):
    runtime = Runtime.of(Deployment(name="local", runtime_dir=str(base / "not" / "yet")))
    before = os.umask(umask)
    try:
        runtime.prepare()
        runtime.prepare()
        with runtime.own("encoder", 0):
            assert stat.S_IMODE(runtime.lock("encoder", 0).stat().st_mode) == 0o600
            for folder in (runtime.directory, runtime.directory.parent):
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_b28_a_folder_somebody_else_could_reach_is_refused(base):
    def refused(folder: Path, why: str) -> None:
        runtime = Runtime.of(named(runtime_dir=str(folder)))
        with pytest.raises(DeploymentError, match=why):
            runtime.prepare()
        with pytest.raises(DeploymentError, match=why), runtime.own("encoder", 0):
            pass

    real = base / "real"
    real.mkdir(0o700)
    (base / "link").symlink_to(real)
    refused(base / "link", "not a folder")
    (base / "file").touch()
    refused(base / "file", "not a folder")
    (base / "open").mkdir()
    (base / "open").chmod(0o770)
    refused(base / "open", r"open to others \(mode 0770\); chmod 700 it")
    refused(Path(_foreign_folder(base)), "belongs to uid")

    inner = Runtime.of(named(runtime_dir=str(real))).directory
    inner.symlink_to(base / "open")
    refused(real, "not a folder")
    inner.unlink()
    inner.mkdir()
    inner.chmod(0o755)
    refused(real, r"mode 0755")
    inner.chmod(0o700)
    real.chmod(0o755)  # others may look at the outer one
    Runtime.of(named(runtime_dir=str(real))).prepare()

    (base / "anybodys").mkdir()
    (base / "anybodys").chmod(0o777)
    refused(base / "anybodys" / "x", "no sticky bit")
    (base / "anybodys").chmod(0o1777)
    Runtime.of(named(runtime_dir=str(base / "anybodys" / "x"))).prepare()


def test_a_folder_that_cannot_be_made_is_a_clear_error(base):
    (base / "file").touch()
    with pytest.raises(DeploymentError, match=r"cannot make the runtime directory .*File exists"):
        Runtime.of(named(runtime_dir=str(base / "file" / "x"))).prepare()


# --- ownership ------------------------------------------------------------------------------------------


def test_b24_a_live_owner_is_named_and_not_disturbed(runtime, child):
    owner = child(OWNER)
    assert heard(owner) == "owned"
    before = sorted(runtime.directory.iterdir())
    who = f"encoder-3 of deployment 'local' is already running: it is process {owner.pid} on {socket.gethostname()}"
    when = r", since 20\d\d-.*\+00:00 with local.yaml"
    with pytest.raises(DeploymentError, match=who + when), runtime.own("encoder", 3):
        pass
    assert sorted(runtime.directory.iterdir()) == before
    with runtime.own("encoder", 4), runtime.own("tokenizer", 3), runtime.own("deployment", 0):
        pass
    owner.communicate("\n", DEADLINE_S)
    assert owner.returncode == 0
    assert not runtime.directory.exists()
    with runtime.own("encoder", 3):
        pass


def test_one_process_cannot_own_twice_either(runtime):
    with runtime.own("deployment", 0) as owner:
        assert owner == runtime.owner("deployment", 0)
        assert owner.pid == os.getpid()
        with pytest.raises(DeploymentError, match=f"process {os.getpid()} "), runtime.own("deployment", 0):
            pass
        assert runtime.owner("deployment", 0) == owner


def test_b24_what_a_killed_owner_left_is_taken_over(runtime, child):
    owner = child(OWNER)
    assert heard(owner) == "owned"
    kill(owner)
    left = {path.name for path in runtime.directory.iterdir()}
    assert left == {"encoder-3.lock", "encoder-3.in", "encoder-3.pool"}
    with runtime.own("encoder", 3) as new:
        assert new.pid == os.getpid()
        assert [path.name for path in runtime.directory.iterdir()] == ["encoder-3.lock"]
        assert runtime.owner("encoder", 3) == new
    assert not runtime.directory.exists()


def test_b10_on_a_full_disk_an_owner_holds_the_lock_without_a_word(runtime):
    """A stage that is started again must not die of what only says who it is."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with capture_logs() as logs:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with runtime.own("encoder", 0):
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                assert runtime.owner("encoder", 0) is None
                with pytest.raises(DeploymentError, match="already running"), runtime.own("encoder", 0):
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [log["event"] for log in logs] == ["owner_not_written"]


def test_an_owner_that_has_not_signed_yet_is_respected(runtime, child):
    with runtime.own("encoder", 3):
        os.truncate(runtime.lock("encoder", 3), 0)
        with pytest.raises(DeploymentError, match="just coming or going; try again"), runtime.own("encoder", 3):
            pass


def test_a_block_that_fails_leaves_nothing(runtime):
    mine = [runtime.inbox("tokenizer", 0), runtime.front_door(0), runtime.broker("tokenizer", 0)]

    def fail() -> None:
        for address in mine:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address.removeprefix("ipc://"))
        raise KeyError

    with pytest.raises(KeyError), runtime.own("tokenizer", 0):
        fail()
    assert not runtime.directory.exists()


def test_only_sockets_of_that_process_are_removed(runtime):
    runtime.prepare()
    others = [runtime.inbox("encoder", 33).removeprefix("ipc://"), runtime.inbox("tokenizer", 3).removeprefix("ipc://")]
    for address in others:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
    note = runtime.directory / "encoder-3.in"
    note.write_text("not a socket")
    with runtime.own("encoder", 3):
        pass
    assert note.read_text() == "not a socket"
    assert all(Path(address).is_socket() for address in others)


def test_a_lock_file_is_not_followed_elsewhere(runtime, base):
    runtime.prepare()
    target = base / "precious"
    target.write_text("precious")
    runtime.lock("encoder", 3).symlink_to(target)
    with pytest.raises(DeploymentError, match="cannot open the lock file"), runtime.own("encoder", 3):
        pass
    assert target.read_text() == "precious"


def test_a_path_with_any_bytes_can_be_the_config(runtime):
    with runtime.own("encoder", 3, config="caf\udce9.yaml") as owner:
        assert runtime.owner("encoder", 3) == owner
        assert str(owner).endswith(" with caf\ufffd.yaml")


def test_b18_children_do_not_keep_the_lock(runtime, child):
    """Not even those started with every descriptor that can be inherited, after a SIGKILL."""
    owner = child(
        """
        with runtime.own("encoder", 3):
            survivor = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], close_fds=False)
            say(survivor.pid)
            sys.stdin.readline()
        """
    )
    pid = int(heard(owner))
    survivor = os.pidfd_open(pid)
    try:
        kill(owner)
        assert not select.select([survivor], [], [], 0)[0], "it must be alive for this test to mean something"
        with runtime.own("encoder", 3):
            pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(survivor, signal.SIGKILL)
        os.close(survivor)


def test_b24_there_is_never_more_than_one_owner(runtime, base, child):
    """Processes that come and go as fast as they can; each marks its time as owner with a file only one can make."""
    marker = base / "marker"
    contenders = [
        child(
            """
            owned = refused = 0
            while owned < 20:
                try:
                    with runtime.own("encoder", 3):
                        os.close(os.open(sys.argv[3], os.O_CREAT | os.O_EXCL))
                        os.sched_yield()
                        os.unlink(sys.argv[3])
                        owned += 1
                except DeploymentError:
                    refused += 1
            say(owned, refused)
            """,
            str(marker),
        )
        for _ in range(5)
    ]
    counts = [heard(contender).split() for contender in contenders]
    assert [contender.wait(DEADLINE_S) for contender in contenders] == [0] * 5
    assert [int(owned) for owned, _ in counts] == [20] * 5
    assert sum(int(refused) for _, refused in counts) > 0
    assert not runtime.directory.exists()


def test_b24_a_lock_on_a_file_that_has_gone_is_none(runtime, monkeypatch):
    """Its last owner unlinks the file after we have opened it; ours must be one that others find."""

    def after_it_was_unlinked(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        runtime.lock("encoder", 3).unlink()
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr("tensorferry.pipeline.process.runtime_dir.fcntl.flock", after_it_was_unlinked)
    with runtime.own("encoder", 3) as owner:
        assert runtime.owner("encoder", 3) == owner
        with pytest.raises(DeploymentError, match="already running"), runtime.own("encoder", 3):
            pass


def test_b24_a_lock_on_a_file_that_was_replaced_is_none(runtime, child, monkeypatch):
    owners = []

    def after_another_came(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        runtime.lock("encoder", 3).unlink()
        owners.append(child(OWNER))
        assert heard(owners[0]) == "owned"
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr("tensorferry.pipeline.process.runtime_dir.fcntl.flock", after_another_came)
    with pytest.raises(DeploymentError, match="already running: it is process"), runtime.own("encoder", 3):
        pass
    assert runtime.owner("encoder", 3).pid == owners[0].pid
    assert Path(runtime.broker("encoder", 3)).is_socket()


def test_b24_a_folder_that_its_last_owner_took_along_is_made_again(runtime, monkeypatch):
    open_ = os.open

    def after_it_was_removed(*arguments: Any) -> int:
        monkeypatch.undo()
        runtime.directory.rmdir()
        return open_(*arguments)

    monkeypatch.setattr(os, "open", after_it_was_removed)
    with runtime.own("encoder", 3) as owner:
        assert runtime.owner("encoder", 3) == owner


def test_a_second_owner_is_refused_also_where_somebody_has_removed_the_folder(runtime, child):
    owner = child(OWNER)
    assert heard(owner) == "owned"
    shutil.rmtree(runtime.directory)
    who = f"'local' is already running: it is process {owner.pid}, whose lock file .*encoder-3.lock was removed"
    with pytest.raises(DeploymentError, match=f"{who}.*kill -TERM {owner.pid}$"), runtime.own("encoder", 3):
        pass
    assert not runtime.directory.exists()
    with runtime.own("encoder", 4):
        pass
    kill(owner)
    with runtime.own("encoder", 3):
        pass


def test_a_lock_file_that_was_removed_alone_costs_the_owner_no_socket(runtime, child):
    owner = child(OWNER)
    assert heard(owner) == "owned"
    runtime.lock("encoder", 3).unlink()
    with pytest.raises(DeploymentError, match="was removed"), runtime.own("encoder", 3):
        pass
    runtime.lock("encoder", 3).touch(0o600)  # nobody's: what a sweep would remove
    assert runtime.sweep() == []
    assert Path(runtime.broker("encoder", 3)).is_socket()


def test_the_owner_itself_makes_its_file_again(runtime):
    with runtime.own("encoder", 3) as owner, contextlib.ExitStack() as held:
        shutil.rmtree(runtime.directory)
        assert runtime.keep("encoder", 3, held)
        assert runtime.owner("encoder", 3).pid == owner.pid
    assert not runtime.directory.exists()


def test_a_name_that_another_user_holds_keeps_nobody_from_starting_and_is_told(runtime, monkeypatch):
    """That user has no way into the folder, so it is not who is looked for."""
    name = name_claim.address(f"encoder-3 {os.path.realpath(runtime.directory)}")
    uid = os.geteuid()
    with socket.socket(socket.AF_UNIX) as squatter, capture_logs() as logs:
        squatter.bind(name)
        squatter.listen()
        monkeypatch.setattr(name_claim, "_holder", lambda name: name_claim.Holder(4711, uid + 1))
        with runtime.own("encoder", 3):
            pass
    [log] = logs
    assert log["event"] == "name_not_claimed"
    assert log["problem"] == f"process 4711 of user {uid + 1} holds it"


@pytest.mark.parametrize("backlog", [None, 0])
def test_a_name_whose_holder_hides_keeps_nobody_from_starting(runtime, backlog):
    name = name_claim.address(f"encoder-3 {os.path.realpath(runtime.directory)}")
    with socket.socket(socket.AF_UNIX) as squatter, socket.socket(socket.AF_UNIX) as asking, capture_logs() as logs:
        squatter.bind(name)
        if backlog is not None:
            squatter.listen(backlog)
            asking.connect(name)  # nobody else can
        with runtime.own("encoder", 3):
            pass
    assert [log["event"] for log in logs] == ["name_not_claimed"]


#: Binds the name of encoder-3 and listens, leaves the socket to a child, and ends.
LEFT_LISTENING = """
import os
from tensorferry.pipeline.process import name_claim
listener = socket.socket(socket.AF_UNIX)
listener.bind(name_claim.address(f"encoder-3 {os.path.realpath(runtime.directory)}"))
listener.listen()
if os.fork() == 0:
    os.read(0, 1)
    os._exit(0)
say("bound")
"""


def test_a_name_that_a_child_of_its_dead_holder_has_is_not_claimed_and_the_log_names_both_remedies(runtime, child):
    holder = child(LEFT_LISTENING)
    assert heard(holder) == "bound"
    holder.wait(DEADLINE_S)
    with capture_logs() as logs, runtime.own("encoder", 3):
        pass
    [log] = logs
    assert log["event"] == "name_not_claimed"
    assert log["problem"] == f"process {holder.pid} bound it and has ended, but a child of that process still holds it"
    assert log["remedy"].startswith("end the children of that process")


def test_b24_the_lock_is_held_until_nothing_is_left(runtime, monkeypatch):
    """Else a successor locks the file that we then unlink, or binds the socket that we then remove."""
    removed = []
    unlink = Path.unlink

    def while_locked(path: Path, missing_ok: bool = False) -> None:
        with open(runtime.lock("tokenizer", 0)) as again, pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", while_locked)
    with runtime.own("tokenizer", 0), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(runtime.front_door(0).removeprefix("ipc://"))
    assert removed == ["tokenizer-0.door", "tokenizer-0.lock"]


def test_sweeping_removes_what_the_dead_left_and_nothing_else(runtime, child):
    dead, alive = child(OWNER), child(OWNER.replace("3", "4"))
    assert (heard(dead), heard(alive)) == ("owned", "owned")
    kill(dead)
    with runtime.own("deployment", 0):
        (runtime.directory / "unrelated.lock").touch()
        assert runtime.sweep() == ["encoder-3"]
        assert {path.name for path in runtime.directory.iterdir()} == {
            "deployment-0.lock", "encoder-4.lock", "encoder-4.in", "encoder-4.pool", "unrelated.lock",
        }  # fmt: skip
        assert runtime.sweep() == []
    alive.communicate("\n", DEADLINE_S)
    assert alive.returncode == 0
    (runtime.directory / "unrelated.lock").unlink()
    runtime.directory.rmdir()
    assert runtime.sweep() == []
