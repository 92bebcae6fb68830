"""A pool's bytes in host memory whose pages a GPU reaches: registered with CUDA, so that copies run at pinned speed.

For a process that works on a GPU while the pool is the host's. To others it is host memory like any other: a consumer
without a GPU reads what a GPU wrote, and one with a GPU copies over what a CPU wrote. Views are CUDA tensors over these
pages; work on them is ordered by streams, as in GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tensorferry.codecs.memory.cuda_device import CudaDevice, StreamOrder
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.memory.cuda_ipc import register, unregister
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.memory.memory import Bytes, GpuHandle, Order

if TYPE_CHECKING:
    from tensorferry.codecs.pool.control import Page


class RegisteredSegment:
    """A HostSegment of this process or of a peer, registered with one GPU. See `memory.Memory`.

    Holds: the segment and its registration, until `close`; a reference to the context.
    """

    on_host = False

    def __init__(self, segment: HostSegment, device: CudaDevice, pointer: int, *, borrowed: bool) -> None:
        """pointer: where the GPU reaches the segment. borrowed: lend the pages themselves, and not a local copy."""
        self.borrowed = borrowed
        self.nbytes = segment.nbytes
        self._segment, self._device, self._pointer = segment, device, pointer
        self._data = device.over(pointer, segment.nbytes)

    @classmethod
    def create(cls, nbytes: int, name: str, ordinal: int, go_on: Callable[[], None]) -> RegisteredSegment:
        """A new segment, which the GPU `ordinal` writes in place.

        Raises as `HostSegment.create`, NoDriver, CudaError.
        """
        return cls._registered(lambda: HostSegment.create(nbytes, name, go_on), ordinal, owned=True)

    @classmethod
    def attach(cls, fd: int, nbytes: int, ordinal: int) -> RegisteredSegment:
        """Map a peer's segment for the GPU `ordinal`, which gets local copies. The caller keeps `fd`.

        Raises as `HostSegment.attach`, NoDriver, CudaError.
        """
        return cls._registered(lambda: HostSegment.attach(fd, nbytes), ordinal, owned=False)

    @classmethod
    def _registered(cls, make: Callable[[], HostSegment], ordinal: int, *, owned: bool) -> RegisteredSegment:
        with ExitStack() as undo:
            device = CudaDevice(Driver.load(), ordinal)
            undo.callback(device.close)
            segment = make()
            undo.callback(segment.close)
            address = segment.data.ctypes.data
            pointer = device.call("register", address, segment.nbytes, read_only=not owned)
            undo.callback(device.call, "unregister", address)
            self = cls(segment, device, pointer, borrowed=owned)
            undo.pop_all()
        return self

    def order(self) -> Order:
        return self._device.order()

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes:
        if self.borrowed:
            return self._data[offset : offset + nbytes]
        assert isinstance(order, StreamOrder)
        local = self._device.empty(nbytes, order.stream)
        self.copy_out(offset, local, order)
        return local

    def copy_out(self, offset: int, into: Bytes, order: Order) -> None:
        assert isinstance(order, StreamOrder)
        self._device.call("copy", into.data_ptr(), self._pointer + offset, into.nbytes, order.stream)

    def returned(self, order: Order) -> None: ...

    def private(self, nbytes: int) -> Bytes | None:
        return self._device.empty(nbytes, self._device.current_stream())

    def adopt(self, page: Page) -> None:
        register(self._device, page)

    def disown(self, page: Page) -> None:
        unregister(self._device, page)

    def descriptors(self) -> list[int]:
        return self._segment.descriptors()

    def handle(self) -> GpuHandle | None:
        return None

    def close(self) -> None:
        """Waits for work that is queued on the memory."""
        self._data = None
        with ExitStack() as undo:
            undo.callback(self._device.close)
            undo.callback(self._segment.close)
            self._device.call("unregister", self._segment.data.ctypes.data)
