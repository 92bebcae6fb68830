"""Addresses on a network, IPv4 and IPv6: where a socket may listen, and what its peers are told to connect to.

| given               | to listen at                          | to connect to           |
|---------------------|---------------------------------------|-------------------------|
| `127.0.0.1`, `::1`  | loopback                              | itself                  |
| `[::1]`             | the same, without the brackets        | the same                |
| `localhost`         | 127.0.0.1                             | itself, a name          |
| `192.0.2.7`         | that interface, with keys alone       | itself                  |
| `fe80::1%eth0`      | the same                              | itself                  |
| `0.0.0.0`, `::`, `*`| every interface, with keys alone      | refused: it is nobody's |
| a host's name       | refused: it may be several interfaces | itself                  |
| with a port         | refused: that is `network.port`       | refused                 |
"""

from __future__ import annotations

import os
import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from tensorferry.codecs.errors import DeploymentError

TCP = "tcp://"
HOST_CHARACTERS = 253  #: of a name. Source: RFC 1035, section 2.3.4, without the lengths on the wire
PATH_NBYTES = 107  #: of a UNIX socket's path. Source: unix(7), sun_path is 108 bytes with its final NUL
_WILDCARD = "*"
_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
_PORTED = re.compile(r"(\[.*\]|[^:]*):[0-9*]*")

Host = IPv4Address | IPv6Address


def listening_host(given: str) -> Host:
    """The interface to listen at. Raises ValueError, whose text says what is wrong and what to write."""
    if given == "localhost":
        return IPv4Address("127.0.0.1")
    if given == _WILDCARD:
        return IPv4Address("0.0.0.0")  # noqa: S104 - asked for by name, and refused without keys
    found = _numeric(given)
    if found is None:
        raise ValueError(f"{given!a} is not the address of an interface; write it in numbers, as 127.0.0.1 or ::1")
    return found


def reachable_host(given: str) -> str:
    """What peers connect to, without brackets: an address or a name. Raises ValueError, as `listening_host`."""
    found = None if given == _WILDCARD else _numeric(given)
    if given == _WILDCARD or (found is not None and is_wildcard(found)):
        raise ValueError(f"{given!a} is every interface and no place to connect to; name one that peers reach")
    if found is not None:
        return str(found)
    # A name of numbers alone is a mistyped address, which resolvers take for a strange one.
    if len(given) > HOST_CHARACTERS or not _NAME.fullmatch(given) or given.rstrip(".").rpartition(".")[2].isdigit():
        raise ValueError(f"{given!a} is neither an address nor a host's name; write what peers can connect to")
    return given


def is_wildcard(host: Host) -> bool:
    return host.is_unspecified


def is_loopback(host: Host) -> bool:
    """Whether nobody outside this machine can connect to it; every user of this machine can."""
    return host.is_loopback


def tcp_address(host: str | Host, port: int) -> str:
    """The ZeroMQ address of a host without brackets."""
    return f"{TCP}[{host}]:{port}" if ":" in str(host) else f"{TCP}{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """What `tcp_address` was given. Raises ValueError for what it does not make."""
    host, _, port = address.removeprefix(TCP).rpartition(":")
    if host.startswith("[") == (":" not in host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!a} is not {TCP}HOST:PORT, an IPv6 address in brackets")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_address(address: str, *, bound: bool = False, curve: bool = False) -> str | None:
    """The path of an ipc address; None for a TCP address. Raises DeploymentError, with the reason, for any other.

    bound: the address is to listen at. curve: the socket has keys; without keys it may listen at loopback only.
    An ipc address is guarded by the permissions of its folder. An abstract name (`ipc://@name`) has no folder, and
    a relative path or a wildcard means something else to every process.
    """
    if address.startswith(TCP):
        _check_tcp(address, bound, curve)
        return None
    path = address.removeprefix("ipc://")
    if path == address:
        raise DeploymentError(
            f"{address}: refused: only ipc:// addresses in the runtime directory and tcp:// are served"
        )
    if not path.startswith("/") or "\0" in path:
        raise DeploymentError(f"{address}: refused: an ipc address is the absolute path of a socket file")
    if (nbytes := len(os.fsencode(path))) > PATH_NBYTES:
        raise DeploymentError(f"{address}: refused: its path has {nbytes} bytes; a UNIX socket takes {PATH_NBYTES}")
    return path


def _check_tcp(address: str, bound: bool, curve: bool) -> None:
    try:
        host, _ = host_and_port(address)
        if not bound:
            reachable_host(host)
            return
        wide = not is_loopback(listening_host(host))
    except ValueError as problem:
        raise DeploymentError(f"{address}: refused: {problem}") from None
    if wide and not curve:
        raise DeploymentError(f"{address}: refused: it can be reached from other machines; set security.keys")


def _numeric(given: str) -> Host | None:
    """An address, if it is one; an IPv4 address within an IPv6 one is the former, since a socket takes it for that."""
    if _PORTED.fullmatch(given):
        raise ValueError(f"{given!a} has a port, which is another key, network.port; leave it away here")
    bare = given[1:-1] if given.startswith("[") and given.endswith("]") else given
    try:
        found = ip_address(bare)
    except ValueError:
        return None
    if isinstance(found, IPv4Address):
        return found if bare == given else None
    return found.ipv4_mapped or found
