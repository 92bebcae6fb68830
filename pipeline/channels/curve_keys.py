"""CURVE keys of a deployment: who may connect to a socket that is bound wider than to this machine.

A folder of keys, made by `tensorferry keys new DIR`, of mode 0700 with files of mode 0600:

    server.key          the deployment's public key: clients know it by this
    server.key_secret   its secret key; where it is, stages can run
    clients/NAME.key    the public keys of those who may submit requests
    client.key_secret   one client's secret key; where it is with server.key, requests can be sent from

The files are certificates as `zmq.auth` and czmq write them. CURVE encrypts with Curve25519 and authenticates both
ends, https://rfc.zeromq.org/spec/26/. A secret that others could read, or a list of clients that others could write,
is refused.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

import zmq
from zmq.utils import z85

from tensorferry.codecs.errors import DeploymentError, OutputError
from tensorferry.codecs.system.files import read_regular

KEY_CHARACTERS = 40  #: of a key in Z85
FILE_NBYTES = 1 << 16
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  #: of a client
DEFAULT_CLIENT = "local"  #: the one whose secret lies beside the server's
_FIELD = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([^"]*)"\s*$', re.MULTILINE)
_HEAD = "# A ZeroMQ CURVE {} of tensorferry.{}\nmetadata\ncurve\n"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both in Z85, as ZeroMQ's options take them."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class CurveServer:
    """What a bound socket is secured with. The domain tells the context's `Gate` whom to let in."""

    pair: KeyPair
    domain: str

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.pair.public, self.pair.secret
        socket.set(zmq.ZAP_DOMAIN, self.domain.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else everybody is let in where nobody answers for the gate


@dataclass(frozen=True, slots=True)
class CurveClient:
    """What a connecting socket is secured with: its own key, and the one that the other end must have."""

    pair: KeyPair
    server: bytes

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.pair.public, self.pair.secret
        socket.curve_serverkey = self.server


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a stage has: the deployment's own pair, and the clients it lets in by their public keys."""

    pair: KeyPair
    clients: Mapping[bytes, str]  #: public key -> name

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Raises DeploymentError, naming file and remedy."""
        folder = _checked(Path(folder))
        pair = _pair(folder / "server.key_secret", "this machine cannot be the deployment's")
        clients: dict[bytes, str] = {}
        listed = _checked(folder / "clients")
        for file in sorted(listed.glob("*.key")):
            clients[_public(file)] = file.stem
        return cls(pair, MappingProxyType(clients))

    def admitted(self, domain: str) -> Mapping[bytes, str]:
        """Public key -> name, of those who may connect there: stages to inboxes, clients to front doors."""
        return self.clients if domain == DOOR else {self.pair.public: "stage"} if domain == INBOX else {}

    def bound(self, domain: str) -> CurveServer:
        return CurveServer(self.pair, domain)

    @property
    def stage(self) -> CurveClient:
        """How stages connect to each other's inboxes: as the deployment itself."""
        return CurveClient(self.pair, self.pair.public)


DOOR, INBOX = "door", "inbox"  #: domains


def client_keys(folder: str | Path) -> CurveClient:
    """What a client has. Raises DeploymentError, naming file and remedy."""
    folder = _checked(Path(folder))
    return CurveClient(
        _pair(folder / "client.key_secret", "no client can connect with it"), _public(folder / "server.key")
    )


# --- files ----------------------------------------------------------------------------------------------------


def make_keys(folder: Path) -> None:
    """A deployment's new keys, and those of its first client, in a folder that is made for them. Raises OutputError."""
    server, client = KeyPair.new(), KeyPair.new()
    _make_folder(folder)
    _make_folder(folder / "clients")
    _write_secret(folder / "server.key_secret", server)
    _write_public(folder / "server.key", server.public)
    _write_secret(folder / "client.key_secret", client)
    _write_public(folder / "clients" / f"{DEFAULT_CLIENT}.key", client.public)


def add_client(folder: Path, name: str, out: Path) -> None:
    """One more client: its public key to the deployment's, and what it needs itself to the new folder `out`.

    Raises OutputError, DeploymentError.
    """
    if not NAME.fullmatch(name):
        raise OutputError(repr(name), "no name of a client; use letters, digits, dots, dashes and underscores")
    server, client = _public(_checked(folder) / "server.key"), KeyPair.new()
    listed = _checked(folder / "clients") / f"{name}.key"
    if listed.exists():
        raise OutputError(str(listed), "there is a client of this name; choose another, or remove the file")
    _make_folder(out)
    _write_public(out / "server.key", server)
    _write_secret(out / "client.key_secret", client)
    _write_public(listed, client.public)  # last: nobody is let in whose key could not be written


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(0o700)
    except OSError as problem:
        advice = "; keys are never replaced, so name a new folder" if isinstance(problem, FileExistsError) else ""
        raise OutputError(str(folder), f"{problem.strerror}{advice}") from None


def _write_public(file: Path, public: bytes) -> None:
    _write(file, _HEAD.format("public key", "") + f'    public-key = "{public.decode()}"\n')


def _write_secret(file: Path, pair: KeyPair) -> None:
    text = _HEAD.format("SECRET key", " Keep it to yourself.")
    _write(file, f'{text}    public-key = "{pair.public.decode()}"\n    secret-key = "{pair.secret.decode()}"\n')


def _write(file: Path, text: str) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as opened:
            opened.write(text)
    except OSError as problem:
        raise OutputError(str(file), problem.strerror or str(problem)) from None


def _checked(folder: Path) -> Path:
    """A folder of keys that is ours alone."""
    try:
        _check_ours(folder, folder.stat(), 0o077, "chmod 700 it")
    except OSError as problem:
        advice = "`tensorferry keys new DIR` makes such a folder"
        raise DeploymentError(f"keys: {folder}: {problem.strerror}; {advice}") from None
    return folder


def _check_ours(path: Path, found: os.stat_result, closed_to_others: int, remedy: str) -> None:
    if found.st_uid != os.geteuid():
        raise DeploymentError(f"keys: {path} belongs to uid {found.st_uid}, not to {os.geteuid()}; make it yours")
    if found.st_mode & closed_to_others:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise DeploymentError(
            f"keys: {path} is open to others (mode {mode}); {remedy}, and if it was seen, make new keys"
        )


def _pair(file: Path, without: str) -> KeyPair:
    """The pair in a secret file, which no one else can read."""
    found = _fields(file, 0o077, "chmod 600 it", without)
    pair = KeyPair(found.get("public", b""), found.get("secret", b""))
    if not (_is_key(pair.public) and _is_key(pair.secret) and zmq.curve_public(pair.secret) == pair.public):
        raise DeploymentError(f"keys: {file} has no pair of keys that belong together; make new keys")
    return pair


def _public(file: Path) -> bytes:
    public = _fields(file, 0o022, "chmod 600 it", "peers are known by it").get("public", b"")
    if not _is_key(public):
        raise DeploymentError(f"keys: {file} has no public key; copy it again, or make new keys")
    return public


def _fields(file: Path, closed_to_others: int, remedy: str, without: str) -> dict[str, bytes]:
    try:
        _check_ours(file, file.stat(), closed_to_others, remedy)
        data = read_regular(file, FILE_NBYTES)
    except OSError as problem:
        raise DeploymentError(f"keys: {file}: {problem.strerror}; {without}") from None
    return {name.decode(): value for name, value in _FIELD.findall(data)}


def _is_key(text: bytes) -> bool:
    if len(text) != KEY_CHARACTERS:
        return False
    try:
        z85.decode(text)
    except (KeyError, struct.error):  # a character that Z85 has not, or five that are beyond 32 bits
        return False
    return True
