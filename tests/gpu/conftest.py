"""GPU tests: skipped where there is no CUDA device; a peer is `programs/gpu_peer.py`, a process of its own."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader

encode = msgspec.msgpack.encode
Peer = Any  #: conftest.Peer
OURS = ("tensorferry", "process", "pidfd")  #: the rest belongs to CUDA, which opens and closes as it likes


def _devices() -> tuple[int, str]:
    try:
        return Driver.load().device_count(), "no CUDA device"
    except FerryError as problem:
        return 0, f"no CUDA device: {problem}"


DEVICES, WHY_NOT = _devices()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.processes)
            if not DEVICES:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def torch() -> Any:
    """torch, with its context open, so that no test is charged for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
    torch.zeros(1, device="cuda").add_(1).cpu()
    torch.empty(1, pin_memory=True)
    return torch


@pytest.fixture
def two_gpus(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is visible; this needs two")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(
    torch: Any, belongings: Callable[[], Any], left: Callable[[Any], list[str]]
) -> Iterator[None]:
    before = belongings()
    yield
    torch.cuda.synchronize()
    still = [name for name in left(before) if any(word in name for word in OURS)]
    assert not still, f"left behind: {still}"


@pytest.fixture
def gpu_peer(start_peer: Callable[..., Peer], torch: Any) -> Peer:
    return start_peer("gpu_peer.py", "ignore")


@pytest.fixture
def connect() -> Callable[[Pool, Peer], int]:
    """Give a peer a pool of ours; its column."""
    return lambda pool, peer: peer.join(pool)


@pytest.fixture
def connect_to() -> Callable[[Peer, Reader], tuple[int, int]]:
    """Take a peer's pool: our column, and the pool."""
    return lambda peer, reader: peer.offer(reader)


def spin(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Wait without giving the other side time to catch up."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"


@pytest.fixture
def feed(torch: Any) -> Callable[..., int]:
    """Fill and send so many items, never waiting for a stream; how many the peer saw wrong."""

    def feed(pool: Pool, peer: Peer, column: int, count: int, nbytes: int, *, early: bool, straight: bool) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        publisher = Publisher(pool)
        with ours:
            peer.send("consume", count, early, straight, fds=[theirs.fileno()])
            theirs.close()
            ours.settimeout(60)
            with torch.cuda.stream(torch.cuda.Stream()):
                for number in range(count):
                    spin(lambda: pool.fits([nbytes]))
                    with publisher.draft([("uint8", (nbytes,))]) as draft:
                        draft.views[0].torch().fill_(number % 251)
                        [payload] = draft.dispatch(column, [])
                        ours.send(encode((payload, number % 251)))
            wrong: int = peer.answer()
        return wrong

    return feed


#: What makes a host wait for a GPU, in the driver and in torch.
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoH", "cuMemFree", "cuMemcpyHtoD")


class HostWaited(AssertionError):
    """Something waited on the host."""


@pytest.fixture
def no_host_waits(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`with no_host_waits() as calls:` raises HostWaited at whatever waits for a GPU; `calls` are the driver's.

    compiled: leave the methods of torch's tensors alone, as what torch.compile made looks whether they are the same. It
    is not blind then: torch itself sees what they do.
    """

    @contextmanager
    def watch(*, compiled: bool = False) -> Iterator[list[str]]:
        calls: list[str] = []
        call = Driver.call

        def traced(self: Driver, name: str, *arguments: Any) -> Any:
            calls.append(name)
            if name in WAITS:
                raise HostWaited(name)
            return call(self, name, *arguments)

        def waits(name: str) -> Callable[..., Any]:
            def refuse(*_: Any, **__: Any) -> Any:
                raise HostWaited(name)

            return refuse

        with monkeypatch.context() as patch:
            patch.setattr(Driver, "call", traced)
            patch.setattr(torch.cuda, "synchronize", waits("torch.cuda.synchronize"))
            for kind in (torch.cuda.Stream, torch.cuda.Event):
                patch.setattr(kind, "synchronize", waits(f"{kind.__name__}.synchronize"))
            for name in () if compiled else ("item", "cpu", "tolist"):
                patch.setattr(torch.Tensor, name, waits(f"Tensor.{name}"))
            mode = torch.cuda.get_sync_debug_mode()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")  # torch's own operations that wait
            try:
                yield calls
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    return watch
