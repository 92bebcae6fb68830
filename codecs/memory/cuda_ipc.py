"""A pool's bytes in the memory of one GPU, mapped by other processes of the node through CUDA IPC.

One allocation, exported once; a consumer opens it under its own device, which may be a peer GPU: that one gets local
copies, made in stream order. Stores of control words go into streams, so nothing here waits on the host, save what
says so: giving memory or a page back waits for the work queued on it. Do that off an event loop.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.memory.cuda_device import CudaDevice, StreamOrder
from tensorferry.codecs.memory.cuda_driver import CudaError, Driver
from tensorferry.codecs.memory.cuda_memory import CudaMemory
from tensorferry.codecs.memory.memory import Bytes, GpuHandle, Order

#: An IPC handle opens a whole allocation; smaller ones may share a page of 2 MiB with others, so take whole pages.
PAGE_NBYTES = 2 << 20

#: What this process has exported, by handle: CUDA does not open a handle where it was made.
_exported: dict[bytes, CudaSegment] = {}
_exported_lock = threading.Lock()


class CudaSegment(CudaMemory):
    """Memory of a GPU that this process has allocated for a pool. See `memory.Memory`.

    Holds: an allocation, until it and all imports of it in this process are closed; a reference to the context.
    """

    borrowed = True

    def __init__(self, device: CudaDevice, pointer: int, nbytes: int, handle: bytes) -> None:
        super().__init__(device)
        self.address, self.nbytes = pointer, nbytes
        self._handle = handle
        self._data = device.over(pointer, nbytes)
        self._users = 1
        with _exported_lock:
            _exported[handle] = self

    @classmethod
    def create(cls, nbytes: int, ordinal: int) -> CudaSegment:
        """ordinal: of the GPU, among those that this process sees. Raises NoDriver, CudaError."""
        with ExitStack() as undo:
            device = CudaDevice(Driver.load(), ordinal)
            undo.callback(device.close)
            pointer = device.call("allocate", -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
            undo.callback(device.call, "free", pointer)
            segment = cls(device, pointer, nbytes, device.call("ipc_export", pointer))
            undo.pop_all()
        return segment

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes:
        return self._data[offset : offset + nbytes]

    def handle(self) -> GpuHandle | None:
        return GpuHandle(self.device.uuid.bytes, self._handle)

    def close(self) -> None:
        """Waits for work that is queued on the memory; consumers keep theirs until they detach."""
        with _exported_lock:
            self._users -= 1
            if self._users:
                return
            del _exported[self._handle]
        self._data = None
        self.device.call("free", self.address)
        self.device.close()


class CudaImport(CudaMemory):
    """Another process's CudaSegment (or this one's own), as it is mapped here. See `memory.Memory`.

    Holds: the mapping, until `close`; without the cache, while something of it is lent. A reference to the context.
    """

    def __init__(self, device: CudaDevice, nbytes: int, gpu: GpuHandle, *, cached: bool) -> None:
        super().__init__(device)
        self.nbytes = nbytes
        self.borrowed = device.uuid.bytes == gpu.device
        self._handle, self._cached = gpu.handle, cached
        self._lock = threading.Lock()
        self._data: Bytes = None
        self._users = 0  # of the mapping; the cache is one
        self._segment: CudaSegment | None = None

    @classmethod
    def attach(cls, gpu: GpuHandle, nbytes: int, *, ordinal: int | None, cached: bool) -> CudaImport:
        """Map a peer's segment, or without the cache see that it can be.

        ordinal: the device to have views on; None: the producer's own where this process sees it, or else this
        thread's current one. Raises AttachRefused, NoDriver, CudaError.
        """
        with ExitStack() as undo:
            device = CudaDevice.of(Driver.load(), gpu.device, ordinal)
            undo.callback(device.close)
            imported = cls(device, nbytes, gpu, cached=cached)
            imported._open()
            undo.callback(imported._shut)
            found = device.call("extent", imported.address)
            if not 0 < nbytes <= found:
                raise AttachRefused(f"an allocation of {found} bytes on {device.uuid}; {nbytes} were announced")
            if not cached:
                imported._shut()
            undo.pop_all()
        return imported

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes:
        if not self.borrowed:
            return self.local(offset, nbytes, order)
        if not self._cached:
            self._open()
        return self._data[offset : offset + nbytes]

    def copy_out(self, offset: int, into: Bytes, order: Order) -> None:
        with ExitStack() as failed:
            if not self._cached:
                self._open()
                failed.callback(self._shut)  # nothing was queued, so `returned` is never called
            for last in (False, True):
                try:
                    super().copy_out(offset, into, order)
                    break
                except CudaError as problem:
                    if problem.sticky or last:
                        raise
                    self.invalidate()
            failed.pop_all()

    def returned(self, order: Order) -> None:
        """Without the cache, waits for the order's stream, and for no other."""
        if not self._cached:
            assert isinstance(order, StreamOrder)
            self.device.call("synchronize", order.stream)
            self._shut()

    def invalidate(self) -> None:
        """Map it again: the present mapping was found stale."""
        with self._lock:
            try:
                self._unmap()
            except CudaError as problem:
                if problem.sticky:
                    raise
            self._map()

    def close(self) -> None:
        """Waits for work that is queued on the memory."""
        if self._cached:
            self._shut()
        self.device.close()

    def _open(self) -> None:
        with self._lock:
            if not self._users:
                self._map()
            self._users += 1

    def _shut(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._unmap()

    def _map(self) -> None:
        with _exported_lock:
            self._segment = _exported.get(self._handle)
            if self._segment is not None:
                self._segment._users += 1
        if self._segment is not None:
            self.address = self._segment.address
        else:
            self.address = self.device.call("ipc_open", self._handle)
        if self.borrowed:
            self._data = self.device.over(self.address, self.nbytes)

    def _unmap(self) -> None:
        address, self.address, self._data = self.address, 0, None
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        elif address:
            self.device.call("ipc_close", address)
