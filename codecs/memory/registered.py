"""A pool's bytes in host memory whose pages a GPU reaches: registered with CUDA, so that copies run at pinned speed.

For a process that works on a GPU while the pool is the host's. To others it is host memory like any other: a consumer
without a GPU reads what a GPU wrote, and one with a GPU copies over what a CPU wrote. Views are CUDA tensors over these
pages; work on them is ordered by streams, as in GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tensorferry.codecs.memory.cuda_device import CudaDevice
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.memory.cuda_memory import CudaMemory
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.memory.memory import Bytes, Order


class RegisteredSegment(CudaMemory):
    """A HostSegment of this process or of a peer, registered with one GPU. See `memory.Memory`.

    Holds: the segment and its registration, until `close`; a reference to the context.
    """

    def __init__(self, segment: HostSegment, device: CudaDevice, pointer: int, *, borrowed: bool) -> None:
        """pointer: where the GPU reaches the segment. borrowed: lend the pages themselves, and not a local copy."""
        super().__init__(device)
        self.borrowed, self.address = borrowed, pointer
        self.nbytes = segment.nbytes
        self._segment = segment
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

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes:
        if self.borrowed:
            return self._data[offset : offset + nbytes]
        return self.local(offset, nbytes, order)

    def descriptors(self) -> list[int]:
        return self._segment.descriptors()

    def close(self) -> None:
        """Waits for work that is queued on the memory."""
        self._data = None
        with ExitStack() as undo:
            undo.callback(self.device.close)
            undo.callback(self._segment.close)
            self.device.call("unregister", self._segment.data.ctypes.data)
