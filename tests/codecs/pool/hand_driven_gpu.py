"""A GPU that runs only when it is told to: no driver, no CUDA device.

Streams are queues of steps that a test runs by hand, so every order between two streams and the host can be looked at.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import numpy as np

from tensorferry.codecs.memory.cuda_device import StreamOrder
from tensorferry.codecs.memory.cuda_driver import CudaError
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES

NBYTES = 1 << 16


DEVICE_POINTER = 0x3000


class HandDrivenGpu:
    """What a StreamOrder and the memories need of a CudaDevice; each stream is a queue of steps."""

    ordinal = 0

    def __init__(self) -> None:
        self.uuid: UUID = uuid4()
        self.current = 1  #: stream
        self.capturing: set[int] = set()
        self.blocking = True  #: streams come after the default one's work too, so none is known to be idle
        self.calls: list[str] = []
        self.closed = 0
        self.registered: dict[int, tuple[int, bool]] = {}  #: by address: bytes, and whether read-only
        self.refuse = ""  #: a method that fails
        self.copies: list[tuple[int, int]] = []  #: source and bytes
        self.refusals: deque[CudaError] = deque()  #: of the next copies
        self._steps: defaultdict[int, deque[Callable[[], bool]]] = defaultdict(deque)
        self._happened: set[int] = set()
        self._events = 0
        self.bytes = np.zeros(NBYTES, np.uint8)

    def run(self, stream: int) -> None:
        """Until the stream is empty, or waits for another."""
        steps = self._steps[stream]
        while steps and steps[0]():
            steps.popleft()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.calls.append(method)
        return getattr(self, method)(*arguments, **options)

    def current_stream(self) -> int:
        return self.current

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def order(self) -> StreamOrder:
        order = StreamOrder(self, self.current)  # type: ignore[arg-type]
        order.check()
        return order

    def over(self, pointer: int, nbytes: int) -> Any:
        if pointer == DEVICE_POINTER:
            return self.bytes[:nbytes]
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))  # registered host memory

    def empty(self, nbytes: int, stream: int) -> Any:
        return Tensor(nbytes)

    def close(self) -> None:
        self.closed += 1

    # --- as the driver

    def register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        if self.refuse == "register":
            raise CudaError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
        self.registered[address] = nbytes, read_only
        return address

    def unregister(self, address: int) -> None:
        del self.registered[address]
        if self.refuse == "unregister":
            raise CudaError("cuMemHostUnregister", "CUDA_ERROR_UNKNOWN")

    def free(self, pointer: int) -> None: ...

    def ipc_open(self, handle: bytes) -> int:
        return 0x1000

    def ipc_close(self, pointer: int) -> None:
        assert pointer == 0x1000

    def write_word(self, stream: int, pointer: int, value: int) -> None:
        def store() -> bool:
            ctypes.c_uint32.from_address(pointer).value = value
            return True

        self._steps[stream].append(store)

    def write_word_if_busy(self, stream: int, pointer: int, value: int) -> bool:
        if not self.blocking and not self._steps[stream]:
            return False
        self.write_word(stream, pointer, value)
        return True

    def copy(self, into: int, source: int, nbytes: int, stream: int) -> None:
        if self.refusals:
            raise self.refusals.popleft()
        self.copies.append((source, nbytes))

    def event(self) -> int:
        self._events += 1
        return self._events

    def record(self, event: int, stream: int) -> None:
        def happen() -> bool:
            self._happened.add(event)
            return True

        self._steps[stream].append(happen)

    def wait_event(self, stream: int, event: int) -> None:
        self._steps[stream].append(lambda: event in self._happened)

    def forget(self, event: int) -> None: ...


class Tensor:
    """As much of one as a copy's target needs."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def data_ptr(self) -> int:
        return 0x2000


class Shop:
    def __init__(self, gpu: HandDrivenGpu, pool: Pool, reader: Reader) -> None:
        self.gpu, self.pool, self.reader = gpu, pool, reader
        self.column = pool.admit(*reader.attach(*pool.export()))

    def publish(self, uses: int = 1) -> Proxy:
        with self.pool.lease(100) as lease:
            lease.dispatch((self.column,))
        slot, generation, offset, _ = lease.grant
        return Proxy(self.pool.description.pool, slot, generation, offset, CODES["uint8"], (100,), 1, uses)

    def publish_written(self, uses: int = 1) -> Proxy:
        proxy = self.publish(uses)
        self.gpu.run(self.gpu.current)
        return proxy

    def out(self) -> int:
        self.pool.reclaim()
        return self.pool.statistics().lent_slots
