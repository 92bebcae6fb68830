"""Addresses on a network, row by row of field report B25: each works, or is refused with what to write instead."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from tensorferry.codecs.errors import ConfigError
from tensorferry.pipeline.channels.addresses import (
    host_and_port,
    is_loopback,
    listening_host,
    reachable_host,
    tcp_address,
)
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.runtime_dir import Runtime

PORTED = "has a port, which is another key, network.port"
NO_INTERFACE = "is not the address of an interface; write it in numbers"
NOBODYS = "is every interface and no place to connect to"
NO_HOST = "is neither an address nor a host's name"


@pytest.mark.parametrize(
    ("given", "listens", "connects"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.8.9.10", "127.8.9.10", "127.8.9.10"),
        ("localhost", "127.0.0.1", "localhost"),
        ("::1", "::1", "::1"),
        ("[::1]", "::1", "::1"),
        ("0:0::0001", "::1", "::1"),
        ("fe80::1%lo", "fe80::1%lo", "fe80::1%lo"),
        ("[fe80::1%eth0]", "fe80::1%eth0", "fe80::1%eth0"),
        ("192.0.2.7", "192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.7"),
        ("0.0.0.0", "0.0.0.0", NOBODYS),
        ("::", "::", NOBODYS),
        ("[::]", "::", NOBODYS),
        ("::ffff:0.0.0.0", "0.0.0.0", NOBODYS),
        ("*", "0.0.0.0", NOBODYS),
        ("[::1]:5555", PORTED, PORTED),
        ("127.0.0.1:5555", PORTED, PORTED),
        ("localhost:*", PORTED, PORTED),
        ("eth0", NO_INTERFACE, "eth0"),
        ("ferry.example.org", NO_INTERFACE, "ferry.example.org"),
        ("", NO_INTERFACE, NO_HOST),
        ("127.1", NO_INTERFACE, NO_HOST),
        ("0x7f000001", NO_INTERFACE, "0x7f000001"),
        ("2130706433", NO_INTERFACE, NO_HOST),
        ("127.0.0.01", NO_INTERFACE, NO_HOST),
        ("[127.0.0.1]", NO_INTERFACE, NO_HOST),
        ("tcp://127.0.0.1", NO_INTERFACE, NO_HOST),
        ("127.0.0.1;10.0.0.1", NO_INTERFACE, NO_HOST),
        ("a b", NO_INTERFACE, NO_HOST),
        ("-x.org", NO_INTERFACE, NO_HOST),
        ("host\n", NO_INTERFACE, NO_HOST),
        ("x" * 64, NO_INTERFACE, NO_HOST),
    ],
)
def test_b25_every_way_to_write_a_host(given: str, listens: str, connects: str) -> None:
    for read, expected in ((listening_host, listens), (reachable_host, connects)):
        if " " in expected:
            with pytest.raises(ValueError, match=expected):
                read(given)
        else:
            assert str(read(given)) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%lo", "ferry.example.org"])
def test_b25_an_address_comes_back_as_it_was_made(host: str) -> None:
    address = tcp_address(host, 5555)
    assert ("[" in address) == (":" in host)
    assert host_and_port(address) == (host, 5555)


@pytest.mark.parametrize("text", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "[::1]", "localhost"])
def test_loopback_is_told_however_it_is_written(text: str) -> None:
    assert is_loopback(listening_host(text))


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "*", "192.0.2.7", "fe80::1%lo", "10.0.0.1", "128.0.0.1"])
def test_what_others_reach_is_no_loopback(text: str) -> None:
    assert not is_loopback(listening_host(text))


# --- in a deployment file ---------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "keys").mkdir()
    file = tmp_path / "ferry.yaml"
    file.write_text("name: net\n")
    return file


KEYS = "security.keys=keys"


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        (["network.bind=192.0.2.7"], "network.bind", "192.0.2.7 can be reached from other machines, and nothing"),
        (["network.bind=192.0.2.7"], "network.bind", "`tensorferry keys new DIR` and set security.keys: DIR, or"),
        (["network.bind='fe80::1%lo'"], "network.bind", "can be reached from other machines"),
        (["network.bind=0.0.0.0", "network.advertise=me.example"], "network.bind", "can be reached"),
        (["network.bind=0.0.0.0", KEYS], "network.bind", "every interface, and clients need one address; set network"),
        (["network.bind='*'", KEYS], "network.bind", "is every interface, and clients need one address"),
        (["network.bind='::'", KEYS, "network.advertise='::'"], "network.advertise", NOBODYS),
        (["network.bind='::'", KEYS, "network.advertise='*'"], "network.advertise", NOBODYS),
        (["network.bind='[::1]:5555'"], "network.bind", PORTED),
        (["network.bind=me.example", KEYS], "network.bind", NO_INTERFACE),
        (["network.advertise=me.example"], "network.advertise", "there are none without network.bind; set that too"),
        (["network.inboxes=tcp"], "network.inboxes", "there are none without network.bind"),
        ([KEYS], "security.keys", "there are none without network.bind"),
        (["network.bind='::1'", "security.keys=none"], "security.keys", "none is not a folder; `tensorferry keys new "),
        (["network.bind='::1'", "network.port=65535", "tokenizer.workers=2"], "network.port", "and the 2 sockets"),
        (["network.bind='::1'", "network.port=65533", "network.inboxes=tcp"], "network.port", "use 65532 or less"),
        (["network.bind='::1'", "network.port=9402", "telemetry.prometheus_port=9400"], "network.port", "meet"),
        (["network.bind='::1'", "network.port=9399", "telemetry.prometheus_port=9400", "network.inboxes=tcp"],
         "network.port", "9399 to 9402 meet the ports of metrics, which start at telemetry.prometheus_port, 9400"),
    ],
)  # fmt: skip
def test_b28_what_is_wrong_is_said_with_key_value_and_remedy(
    file: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], key: str, says: str
) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError) as caught:
        load(file, settings)
    assert caught.value.key == key
    assert says in str(caught.value)


def test_by_default_nothing_listens_on_a_network(file: Path) -> None:
    runtime = Runtime.of(load(file))
    assert runtime.network is None
    assert {runtime.front_door(0)[:7], runtime.inbox("encoder", 0)[:7]} == {"ipc:///"}


@pytest.mark.parametrize(
    ("bind", "advertise", "listens", "connects"),
    [
        ("127.0.0.1", None, "tcp://127.0.0.1", "tcp://127.0.0.1"),
        ("::1", None, "tcp://[::1]", "tcp://[::1]"),
        ("::", "ferry.example.org", "tcp://[::]", "tcp://ferry.example.org"),
        ("*", "192.0.2.7", "tcp://0.0.0.0", "tcp://192.0.2.7"),
    ],
)
def test_b24_b25_every_socket_has_a_port_of_its_own_that_both_ends_compute(
    file: Path, monkeypatch: pytest.MonkeyPatch, bind: str, advertise: str | None, listens: str, connects: str
) -> None:
    monkeypatch.chdir(file.parent)
    settings = [f"network.bind='{bind}'", KEYS, "network.inboxes=tcp", "tokenizer.workers=2", "encoder.ranks=2"]
    settings += [f"network.advertise={advertise}"] if advertise else []
    runtime = Runtime.of(load(file, settings))
    places = [("tokenizer", 0), ("tokenizer", 1), ("encoder", 0), ("encoder", 1), ("scheduler", 0)]
    addresses = [runtime.front_door(0), runtime.front_door(1), *(runtime.inbox(*place) for place in places)]
    assert addresses == [f"{connects}:{7700 + number}" for number in range(7)]
    assert [runtime.listening(address) for address in addresses] == [f"{listens}:{7700 + n}" for n in range(7)]
    for address in addresses:
        host, _ = host_and_port(address)
        assert host not in ("0.0.0.0", "::", "*")


def test_an_address_in_the_folder_is_listened_at_as_it_is(file: Path) -> None:
    runtime = Runtime.of(load(file, ["network.bind=127.0.0.1"]))
    assert runtime.inbox("encoder", 0).startswith("ipc://"), "messages between stages stay on the machine"
    assert runtime.listening(runtime.inbox("encoder", 0)) == runtime.inbox("encoder", 0)
    assert ip_address(host_and_port(runtime.front_door(0))[0]).is_loopback
