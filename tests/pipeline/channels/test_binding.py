"""Where a channel may listen, and what is left of its address."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest
from tests.pipeline.channels.processes import (
    LIMITS,
    beat,
    descriptors,
    numbers,
    receive_all,
)

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.channels.channels import (
    Dealer,
    FrontDoor,
    Inbox,
    Outbox,
    check_address,
)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:*", "tcp://*:5555", "tcp://::1:5555", "tcp://[127.0.0.1]:5555", "tcp://0.0.0.0:1", "tcp://[::]:1",
        "tcp://[::ffff:0.0.0.0]:5555", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:*", "tcp://:5555", "tcp://127.0.0.1:1;127.0.0.1:2", "tcp://",
        "inproc://it", "pgm://eth0;239.1.1.1:5555", "udp://127.0.0.1:5", "ipc://*", "ipc://@abstract",
        "ipc://relative/path", "ipc://", "", "*", "localhost:5555", "/a/path", "ipc:///a\0b",
        "ipc:///" + "x" * 107, "ipc:///" + "ä" * 54,
    ],
)  # fmt: skip
async def test_b28_an_address_that_is_wider_or_unclear_is_refused(context, dropped, address):
    for make in (
        lambda: Inbox(context, address, LIMITS, dropped.append),
        lambda: FrontDoor(context, address, LIMITS, dropped.append),
        lambda: Outbox(context, address, "peer"),
        lambda: Dealer(context, address, "peer", LIMITS, dropped.append),
    ):
        with pytest.raises(DeploymentError, match="refused"):
            make()


@pytest.mark.parametrize("address", ["tcp://192.0.2.7:5555", "tcp://[2001:db8::7]:5555", "tcp://[fe80::1%lo]:5555"])
async def test_b28_nobody_listens_beyond_loopback_without_keys(context, dropped, address):
    for kind in (Inbox, FrontDoor):
        with pytest.raises(
            DeploymentError, match=r"refused: it can be reached from other machines; set security\.keys"
        ):
            kind(context, address, LIMITS, dropped.append)


@pytest.mark.parametrize("letter", ["x", "ä"])
async def test_b23_a_path_of_107_bytes_is_served(context, home, dropped, letter):
    room = 107 - len(os.fsencode(home)) - 1
    name = letter * (room // len(letter.encode())) + "y" * (room % len(letter.encode()))
    address = f"ipc://{home}/{name}"
    inbox = Inbox(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "self")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(inbox, 1)) == [1]
    inbox.close()
    outbox.close()
    with pytest.raises(DeploymentError, match=r"has 10[89] bytes"):
        Inbox(context, f"ipc://{home}/{name}{letter}", LIMITS, dropped.append)


async def test_b24_an_address_in_use_is_refused_not_stolen(context, address, dropped):
    inbox = Inbox(context, address, LIMITS, dropped.append)
    for kind in (Inbox, FrontDoor):
        with pytest.raises(DeploymentError, match=f"cannot listen at {address}: Address already in use"):
            kind(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "first")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(inbox, 1)) == [1]
    inbox.close()
    outbox.close()
    with pytest.raises(DeploymentError, match="No such file or directory"):
        Inbox(context, f"{address}/missing/folder", LIMITS, dropped.append)


async def test_a_closed_inbox_leaves_no_file_and_takes_nobody_elses(context, address, dropped):
    path = check_address(address)
    first = Inbox(context, address, LIMITS, dropped.append)
    os.unlink(path)  # what a successor does with a dead owner's file
    second = Inbox(context, address, LIMITS, dropped.append)
    first.close()
    assert os.access(path, os.F_OK)
    outbox = Outbox(context, address, "second")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(second, 1)) == [1]
    second.close()
    assert not os.access(path, os.F_OK)
    outbox.close()


@pytest.mark.processes
async def test_children_inherit_no_descriptor_of_ours(context, address, dropped):
    inbox = Inbox(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "self")
    outbox.send_nowait(beat(1))
    await receive_all(inbox, 1)
    ours = {fd for fd in descriptors() if fd.startswith(("socket:", "anon_inode:[event"))}
    assert ours
    command = ["ls", "-l", "/proc/self/fd"]
    listing = (await asyncio.to_thread(subprocess.run, command, close_fds=False, capture_output=True)).stdout.decode()
    inherited = [fd for fd in ours if fd.startswith("socket:") and fd in listing]
    assert not inherited
    assert "anon_inode:[event" not in listing
    inbox.close()
    outbox.close()
