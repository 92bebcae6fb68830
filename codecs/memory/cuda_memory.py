"""What all memories that a GPU works on have in common: streams give the order, and reach the words."""

from __future__ import annotations

from tensorferry.codecs.memory.cuda_device import CudaDevice, StreamOrder
from tensorferry.codecs.memory.memory import Bytes, GpuHandle, Order, WordPage


class CudaMemory:
    """See `memory.Memory`; the rest of that is each kind's own."""

    on_host = False
    address = 0  #: where the GPU reaches the first byte; 0: it is not mapped

    def __init__(self, device: CudaDevice) -> None:
        self.device = device

    def order(self) -> Order:
        return self.device.order()

    def copy_out(self, offset: int, into: Bytes, order: Order) -> None:
        assert isinstance(order, StreamOrder)
        self.device.call("copy", into.data_ptr(), self.address + offset, into.nbytes, order.stream)

    def local(self, offset: int, nbytes: int, order: Order) -> Bytes:
        """A copy in memory of torch's on this device."""
        assert isinstance(order, StreamOrder)
        copy = self.device.empty(nbytes, order.stream)
        self.copy_out(offset, copy, order)
        return copy

    def returned(self, order: Order) -> None: ...

    def private(self, nbytes: int) -> Bytes | None:
        return self.device.empty(nbytes, self.device.current_stream())

    def adopt(self, page: WordPage) -> None:
        """Let streams store into a page of this process's own words. No process's stream touches another's page."""
        page.device_address = self.device.call("register", page.address, page.nbytes, read_only=False)

    def disown(self, page: WordPage) -> None:
        """Waits for the stores and waits that are queued on it (cuMemHostUnregister; seen on an H200)."""
        if page.device_address:
            page.device_address = 0
            self.device.call("unregister", page.address)

    def descriptors(self) -> list[int]:
        return []

    def handle(self) -> GpuHandle | None:
        return None
