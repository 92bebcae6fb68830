"""Sealed memfds: present before anybody relies on them, unchangeable in size, read-only to peers, nameless."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.memory.free_memory import available_nbytes
from tensorferry.codecs.memory.host import SEALS, STEP_NBYTES, HostSegment, NoMemory
from tensorferry.codecs.pool.control import AckPage, ControlPage

NBYTES = 1 << 20


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    segment = HostSegment.create(NBYTES, "tensorferry-test")
    yield segment
    segment.close()


def test_every_page_is_there_before_it_is_used(segment: HostSegment) -> None:
    assert os.fstat(segment.fd).st_blocks * 512 >= NBYTES
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    segment.data[:: mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < NBYTES // mmap.PAGESIZE // 4


def test_every_page_is_mapped_before_a_peer_reads_it(segment: HostSegment) -> None:
    peer = HostSegment.attach(segment.fd, NBYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert not peer.data[:: mmap.PAGESIZE].any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < NBYTES // mmap.PAGESIZE // 4
    peer.close()


class Enough(Exception):
    pass


def test_making_a_segment_can_be_given_up(segment: HostSegment) -> None:
    """(What is left behind, the fixture of every test looks for.)"""
    steps = []

    def go_on() -> None:
        steps.append(1)
        if len(steps) == 3:
            raise Enough

    with pytest.raises(Enough):
        HostSegment.create(3 * STEP_NBYTES, "tensorferry-test", go_on)
    assert len(steps) == 3


def test_a_peer_sees_what_the_owner_writes(segment: HostSegment) -> None:
    peer = HostSegment.attach(segment.fd, NBYTES)
    segment.data[-1] = 7
    assert peer.data[-1] == 7
    assert peer.data.nbytes == NBYTES
    peer.close()


@pytest.mark.parametrize("size", [0, NBYTES - 1, NBYTES + 1, NBYTES * 2])
def test_a20_nobody_changes_its_size(segment: HostSegment, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, size)
    assert os.fstat(segment.fd).st_size == NBYTES


def test_a20_nobody_else_maps_it_writable_or_writes_to_it(segment: HostSegment) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"\x01", 0)
    again = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(again, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(again)


def test_nobody_takes_its_seals_off_or_adds_any(segment: HostSegment) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == SEALS


@pytest.mark.processes
def test_nobody_punches_holes_into_it(segment: HostSegment) -> None:
    program = (
        "import ctypes, sys; libc = ctypes.CDLL(None, use_errno=True);"
        "keep_size_punch_hole = 3;"
        f"print(libc.fallocate64({segment.fd}, keep_size_punch_hole, ctypes.c_int64(0), ctypes.c_int64(4096)),"
        " ctypes.get_errno())"
    )
    ran = subprocess.run([sys.executable, "-c", program], pass_fds=[segment.fd], capture_output=True, timeout=20)
    assert ran.stdout.split() == [b"-1", str(errno.EPERM).encode()]


def test_its_descriptors_are_not_inherited(segment: HostSegment) -> None:
    assert not os.get_inheritable(segment.fd)


def test_its_memory_stays_with_a_view_that_is_out_and_goes_with_it(segment: HostSegment) -> None:
    view = segment.data[10:20]
    view[:] = 3
    segment.close()
    assert view.tolist() == [3] * 10
    assert "tensorferry-test" in Path("/proc/self/maps").read_text()
    del view
    assert "tensorferry-test" not in Path("/proc/self/maps").read_text()


def test_closing_twice_and_closing_the_descriptor_first_are_fine(segment: HostSegment) -> None:
    segment.close_fd()
    segment.data[0] = 1
    segment.close_fd()
    segment.close()
    segment.close()


def test_torch_and_numpy_take_a_peer_s_memory_without_a_warning(segment: HostSegment) -> None:
    from torch.utils.dlpack import from_dlpack

    peer = HostSegment.attach(segment.fd, NBYTES)
    segment.data[:4] = 1
    tensor = from_dlpack(peer.data[:4])
    assert tensor.tolist() == [1, 1, 1, 1]
    del tensor
    peer.close()


@pytest.mark.parametrize("nbytes", [1 << 45, 1 << 50, (1 << 63) - 1, 0, -1])
def test_b12_too_much_memory_is_refused_at_once(nbytes: int) -> None:
    """Not later, by SIGBUS or the OOM killer. (What is left behind, the fixture of every test looks for.)"""
    with pytest.raises(NoMemory, match="lower the pool's budget_mb") as refused:
        HostSegment.create(nbytes, "tensorferry-test")
    assert refused.value.nbytes == nbytes


def test_b12_one_byte_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.codecs.memory.host.available_nbytes", lambda: 8192)
    HostSegment.create(8192, "tensorferry-test").close()
    with pytest.raises(NoMemory, match="no 8193 bytes of shared memory: 8192 are available"):
        HostSegment.create(8193, "tensorferry-test")


# --- how much there is


def machine(root: Path, available_kb: int, cgroup: str, files: dict[str, str]) -> Path:
    """A /proc and /sys that say so."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group(path: str, files: tuple[str, str, str], most: object, now: int, reclaimable: int) -> dict[str, str]:
    limit, used, line = files
    return {
        f"{path}/{limit}": f"{most}\n",
        f"{path}/{used}": f"{now}\n",
        f"{path}/memory.stat": f"anon 5\n{line} {reclaimable}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("", {}, 100 << 10),
        ("0::/\n", {}, 100 << 10),
        ("0::/a/b\n", group("a/b", V2, "max", 7, 0), 100 << 10),
        ("0::/a/b\n", group("a/b", V2, 5000, 3000, 500), 2500),
        ("0::/a/b\n", group("a/b", V2, "max", 1, 0) | group("a", V2, 900, 100, 0), 800),
        ("0::/a\n", group("a", V2, 100, 300, 0), 0),
        ("0::/\n", group(".", V2, 5000, 1000, 0), 4000),  # a container's view of itself
        ("0::/not/seen/from/here\n", group(".", V2, 5000, 1000, 0), 4000),
        ("0::/a\n", group("unified/a", V2, 5000, 1000, 0), 4000),
        ("4:memory:/a\n0::/\n", group("memory/a", V1, 5000, 1000, 1), 4001),
        ("4:cpu,memory:/x\n", group("memory", V1, 5000, 1000, 0), 4000),
        ("3:cpuset:/a\n", group("memory/a", V1, 5, 1, 0), 100 << 10),
    ],
)
def test_what_is_available_is_what_the_tightest_group_leaves(
    tmp_path: Path, cgroup: str, files: dict[str, str], left: int
) -> None:
    assert available_nbytes(machine(tmp_path, 100, cgroup, files)) == left


def test_a_machine_without_control_groups_is_asked_for_its_memory_alone(tmp_path: Path) -> None:
    root = machine(tmp_path, 100, "", {})
    (root / "proc/self/cgroup").unlink()
    assert available_nbytes(root) == 100 << 10


# --- what a peer may not send -----------------------------------------------------------------------------


@contextmanager
def memfd(size: int, seals: int | None, fill: bool = True) -> Iterator[int]:
    fd = os.memfd_create("tensorferry-foreign", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        if fill and size:
            os.posix_fallocate(fd, 0, size)
        if seals is not None:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def foreign() -> Iterator[Any]:
    @contextmanager
    def opened(path: str, flags: int = os.O_RDWR) -> Iterator[int]:
        fd = os.open(path, flags)
        yield fd
        os.close(fd)

    @contextmanager
    def ordinary_file() -> Iterator[int]:
        with tempfile.TemporaryFile() as file:
            file.truncate(4096)
            yield file.fileno()

    @contextmanager
    def pipe() -> Iterator[int]:
        reading, writing = os.pipe()
        yield reading
        os.close(reading)
        os.close(writing)

    each = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, SEALS & ~(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    yield pytest.param(lambda: memfd(4096, None), "seals 0x0", id="unsealed")
    yield pytest.param(lambda: memfd(4096, SEALS & ~each[0]), "seals", id="can shrink")
    yield pytest.param(lambda: memfd(4096, SEALS & ~each[1]), "seals", id="can grow")
    yield pytest.param(lambda: memfd(4096, SEALS & ~0x10), "seals", id="can be written")
    yield pytest.param(lambda: memfd(4095, SEALS), "4095 bytes; 4096 were announced", id="truncated")
    yield pytest.param(lambda: memfd(4097, SEALS), "4097 bytes", id="too large")
    yield pytest.param(lambda: memfd(0, SEALS), "0 bytes", id="empty")
    yield pytest.param(lambda: memfd(4096, SEALS, fill=False), "0 of its 4096 bytes present", id="hollow")
    yield pytest.param(lambda: opened("/dev/null"), "not a memfd", id="a device")
    yield pytest.param(lambda: opened("/", os.O_RDONLY), "not a memfd", id="a folder")
    yield pytest.param(ordinary_file, "not a memfd|seals", id="a file")
    yield pytest.param(pipe, "not a memfd", id="a pipe")


@pytest.mark.parametrize(("make", "problem"), list(foreign()))
def test_a20_a_foreign_descriptor_is_refused(make: Callable[[], Any], problem: str) -> None:
    with make() as fd:
        with pytest.raises(AttachRefused, match=problem):
            HostSegment.attach(fd, 4096)
        os.fstat(fd)  # it is still the caller's


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_segment_of_no_bytes_is_refused(nbytes: int) -> None:
    with memfd(0, SEALS) as fd, pytest.raises(AttachRefused):
        HostSegment.attach(fd, nbytes)


def test_a_hollow_segment_costs_its_reader_nothing() -> None:
    with memfd(1 << 40, SEALS, fill=False) as fd, pytest.raises(AttachRefused, match="present"):
        HostSegment.attach(fd, 1 << 40)


# --- pages of control words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "pool", "writer"), [(8, 5, 7), (7, 6, 7), (7, 5, 8)], ids=["slots", "pool", "writer"]
)
def test_a_page_that_is_not_the_one_announced_is_refused(slots: int, pool: int, writer: int) -> None:
    for kind in (ControlPage, AckPage):
        page = kind.create(slots, pool, writer)
        with pytest.raises(AttachRefused):
            kind.attach(page.segment.fd, 7, 5, 7)
        kind.attach(page.segment.fd, slots, pool, writer).close()
        page.close()


def test_one_kind_of_page_is_not_the_other() -> None:
    """Even where the sizes agree: an ack page of 24 slots is as long as a control page of 8."""
    acks, control = AckPage.create(24, 5, 7), ControlPage.create(8, 5, 7)
    with pytest.raises(AttachRefused, match="header"):
        ControlPage.attach(acks.segment.fd, 8, 5, 7)
    with pytest.raises(AttachRefused, match="header"):
        AckPage.attach(control.segment.fd, 24, 5, 7)
    acks.close()
    control.close()


@pytest.mark.parametrize("place", [0, 8])
def test_a_page_of_another_kind_or_version_is_refused(place: int) -> None:
    page = AckPage.create(7, 5, 7)
    page.segment.data[place] += 1
    with pytest.raises(AttachRefused, match="header"):
        AckPage.attach(page.segment.fd, 7, 5, 7)
    page.close()


def test_the_words_lie_where_the_protocol_says() -> None:
    """docs/protocol.md: a header of 64 bytes, then `lease`, `ready` and `poison`, one after the other."""
    slots = 5
    page = ControlPage.create(slots, pool=0x1111, writer=0x2222)
    page.lend(1, 101)
    page.set_ready(2, 102)
    page.set_poison(3, 103)
    raw = page.segment.data.tobytes()
    assert raw[:8] == b"TFCTRL\0\0"
    assert np.frombuffer(raw[8:16], "<u4").tolist() == [1, slots]
    assert np.frombuffer(raw[16:32], "<u8").tolist() == [0x1111, 0x2222]
    assert raw[32:64] == bytes(32)
    words = np.frombuffer(raw[64:], "<u4").reshape(3, slots)
    assert words.tolist() == [[0, 101, 0, 0, 0], [0, 0, 102, 0, 0], [0, 0, 0, 103, 0]]
    assert page.look(1) == (101, 0, 0)
    page.close()
    acks = AckPage.create(slots, pool=0x1111, writer=0x3333)
    acks.acknowledge(4, 104)
    raw = acks.segment.data.tobytes()
    assert raw[:8] == b"TFACKS\0\0"
    assert np.frombuffer(raw[16:32], "<u8").tolist() == [0x1111, 0x3333]
    assert np.frombuffer(raw[64:], "<u4").tolist() == [0, 0, 0, 0, 104]
    acks.close()
