"""Key files: who may read them is checked, what they say is checked, and nothing is ever replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.auth
from click.testing import CliRunner

from tensorferry.cli.main import main
from tensorferry.codecs.errors import DeploymentError, OutputError
from tensorferry.pipeline.channels.curve_keys import DOOR, INBOX, ServerKeys, add_client, client_keys, make_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_keys(folder)
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_b28_files_are_0600_in_folders_of_0700(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_keys(tmp_path / "keys")
        add_client(tmp_path / "keys", "ann", tmp_path / "ann")
    finally:
        os.umask(before)
    made = [path for top in ("keys", "ann") for path in (tmp_path / top, *(tmp_path / top).rglob("*"))]
    assert {path.name for path in made if path.is_file()} == {
        "server.key", "server.key_secret", "client.key_secret", "local.key", "ann.key",
    }  # fmt: skip
    assert {(path.is_dir(), mode(path)) for path in made} == {(True, 0o700), (False, 0o600)}


def test_both_ends_read_what_belongs_together(folder: Path, tmp_path: Path) -> None:
    add_client(folder, "ann", tmp_path / "ann")
    server, local, ann = ServerKeys.read(folder), client_keys(folder), client_keys(tmp_path / "ann")
    assert local.server == ann.server == server.pair.public
    assert dict(server.clients) == {local.pair.public: "local", ann.pair.public: "ann"}
    assert server.admitted(DOOR) == server.clients
    assert dict(server.admitted(INBOX)) == {server.pair.public: "stage"}, "a client is no stage"
    assert server.stage.pair == server.pair
    assert not server.admitted("elsewhere")
    secrets = [local.pair.secret.decode(), server.pair.secret.decode()]
    assert not any(secret in repr((server, local)) for secret in secrets)


def test_other_tools_of_zeromq_read_the_files(folder: Path) -> None:
    pair = ServerKeys.read(folder).pair
    assert zmq.auth.load_certificate(folder / "server.key_secret") == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(folder / "server.key") == (pair.public, None)


def _opened(path: str, to: int) -> Callable[[Path], None]:
    return lambda folder: (folder / path).chmod(to)


def _written(path: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / path).unlink(missing_ok=True)
        (folder / path).touch(0o600)
        (folder / path).write_text(text)

    return write


def _fifo(folder: Path) -> None:
    (folder / "server.key_secret").unlink()
    os.mkfifo(folder / "server.key_secret", 0o600)


def _swapped(folder: Path) -> None:
    secret = (folder / "server.key_secret").read_text()
    other = (folder / "client.key_secret").read_text()
    _written("server.key_secret", secret.splitlines()[3] + "\n" + other.splitlines()[4])(folder)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_opened("", 0o750), r"keys is open to others \(mode 0750\); chmod 700 it"),
        (_opened("clients", 0o770), r"clients is open to others \(mode 0770\); chmod 700 it"),
        (_opened("server.key_secret", 0o640), r"server.key_secret is open to others \(mode 0640\); chmod 600 it"),
        (_opened("clients/local.key", 0o620), r"local.key is open to others \(mode 0620\)"),
        (lambda folder: (folder / "server.key_secret").unlink(), "server.key_secret: No such file .*cannot be"),
        (_fifo, "server.key_secret: not a regular file"),
        (_written("server.key_secret", ""), "server.key_secret has no pair of keys that belong together"),
        (_swapped, "server.key_secret has no pair of keys that belong together"),
        (_written("clients/eve.key", "nothing"), "eve.key has no public key; copy it again"),
        (_written("clients/eve.key", f'public-key = "{"~" * 40}"'), "eve.key has no public key"),
        (_written("clients/eve.key", f'public-key = "{"#" * 40}"'), "eve.key has no public key"),
        (_written("clients/eve.key", "x" * 100_000), "eve.key: 100000 bytes; at most 65536 are read"),
    ],
)  # fmt: skip
def test_b28_a_folder_that_cannot_be_trusted_is_refused(folder: Path, harm: Callable[[Path], None], says: str) -> None:
    harm(folder)
    with pytest.raises(DeploymentError, match=f"^keys: .*{says}"):
        ServerKeys.read(folder)


def test_a_clients_folder_is_checked_too(folder: Path, tmp_path: Path) -> None:
    add_client(folder, "ann", tmp_path / "ann")
    with pytest.raises(DeploymentError, match=r"server.key_secret: No such file .*cannot be the deployment's"):
        ServerKeys.read(tmp_path / "ann")
    (tmp_path / "ann" / "client.key_secret").chmod(0o604)
    with pytest.raises(DeploymentError, match=r"client.key_secret is open to others \(mode 0604\)"):
        client_keys(tmp_path / "ann")
    with pytest.raises(
        DeploymentError, match=r"elsewhere: No such file .*`tensorferry keys new DIR` makes such a folder"
    ):
        client_keys(tmp_path / "elsewhere")


def test_keys_of_another_user_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(DeploymentError, match=r"belongs to uid \d+, not to \d+; make it yours"):
        ServerKeys.read(folder)


def test_nothing_is_ever_replaced(folder: Path, tmp_path: Path) -> None:
    before = ServerKeys.read(folder)
    with pytest.raises(OutputError, match="File exists; keys are never replaced, so name a new folder"):
        make_keys(folder)
    add_client(folder, "ann", tmp_path / "ann")
    with pytest.raises(OutputError, match="there is a client of this name"):
        add_client(folder, "ann", tmp_path / "other")
    with pytest.raises(OutputError, match="keys are never replaced"):
        add_client(folder, "bob", tmp_path / "ann")
    assert ServerKeys.read(folder).pair == before.pair
    assert sorted(ServerKeys.read(folder).clients.values()) == ["ann", "local"], "bob has no key, so he is not let in"


@pytest.mark.parametrize("name", ["", ".", "..", "../eve", "a/b", "-x", "ann bob", "a" * 65, "ann\n"])
def test_a_clients_name_is_no_path(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="no name of a client"):
        add_client(folder, name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_commands(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        ran = CliRunner().invoke(main, ["keys", *arguments])
        return ran.exit_code, ran.output

    keys, ann = str(tmp_path / "keys"), str(tmp_path / "ann")
    assert run("new", keys) == (0, f"made {keys}; set security.keys to it\n")
    assert run("new", keys)[0] == 2
    assert run("add", keys, "ann", "--out", ann)[0] == 0
    assert client_keys(ann).server == ServerKeys.read(keys).pair.public
    assert run("add", keys, "ann", "--out", str(tmp_path / "other"))[0] == 2
    assert run("new", str(tmp_path / "no" / "keys"))[0] == 2


def test_a_folder_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes an empty path for the present folder, which of course exists."""
    monkeypatch.chdir(tmp_path)
    make_keys(tmp_path / "keys")
    for arguments in (["new", ""], ["add", "keys", "ann", "--out", ""]):
        done = CliRunner().invoke(main, ["keys", *arguments])
        assert done.exit_code == 2
        assert "'' is not a path; name a folder" in done.output
    with pytest.raises(OutputError, match=r"^'': no name of a client"):
        add_client(tmp_path / "keys", "", tmp_path / "out")


def test_config_check_says_where_keys_are_a_client_s_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    file = tmp_path / "deployment.yaml"
    file.write_text("name: a\nnetwork: {bind: 127.0.0.1}\nsecurity: {keys: keys}\n")
    assert CliRunner().invoke(main, ["config", "check", str(file)]).output == f"{file}: ok\n"
    (tmp_path / "keys" / "server.key_secret").unlink()
    done = CliRunner().invoke(main, ["config", "check", str(file)])
    assert done.exit_code == 0
    assert "note: security.keys: " in done.output
    assert "this machine cannot be the deployment's" in " ".join(done.output.split())
