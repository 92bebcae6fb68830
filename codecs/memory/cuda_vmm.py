"""A pool's bytes in chunks of GPU memory, mapped side by side into reserved addresses as they are needed.

The producer makes chunks and exports them, a consumer imports them; each maps them at the same place of its own
addresses, so an offset means the same to both, and a tensor may lie across chunks. Which chunks there are is decided
elsewhere (`pool/elastic/chunks.py`); here is what it takes. Giving addresses back waits for the device, so do it off an
event loop; nothing else here waits.
"""

from __future__ import annotations

from contextlib import ExitStack

from tensorferry.codecs.errors import AttachRefused, FerryError
from tensorferry.codecs.memory.cuda_device import CudaDevice
from tensorferry.codecs.memory.cuda_driver import CudaError, Driver, HandleKind
from tensorferry.codecs.memory.cuda_memory import CudaMemory
from tensorferry.codecs.memory.memory import Bytes, GpuHandle, Handle, Order, let_go

CHUNK_NBYTES = 64 << 20  #: a chunk costs about 1 ms to make and hand over, whatever its size


class BudgetTooSmall(FerryError):
    """A pool's budget is smaller than the smallest chunk."""

    def __init__(self, nbytes: int, granularity: int) -> None:
        super().__init__(nbytes, granularity)
        self.nbytes, self.granularity = nbytes, granularity

    def __str__(self) -> str:
        return f"a pool of {self.nbytes} bytes: GPU memory comes in chunks of {self.granularity}; raise its budget_mb"


class NoFabric(FerryError):
    """This process cannot make FABRIC handles, and so not open them either: the memory of other nodes is out of reach.

    The driver's attribute says yes all the same where it is the permission that is missing (seen on an H200).
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"FABRIC handles do not work here ({self.problem}): they need a GPU in a multi-node NVLink domain, the "
            "IMEX daemon on every node of it (nvidia-imex; nvidia-imex-ctl -N shows them), and an IMEX channel in "
            "every container (/dev/nvidia-caps-imex-channels/channel0)"
        )


def divided(nbytes: int, chunk_nbytes: int, granularity: int) -> tuple[int, int]:
    """(positions, bytes of a chunk) for a budget: chunks of at most chunk_nbytes, and multiples of the granularity.

    All chunks of a pool are equally large, so a budget that is no multiple of the wanted size gets smaller ones: those
    that leave the least of it unused, down to half the wanted size, and the largest of equally good ones. The product
    is never above nbytes; (0, 0) where not even one granule fits.
    """
    wanted = max(min(chunk_nbytes, nbytes) // granularity, 1) * granularity
    if nbytes < granularity:
        return 0, 0
    fewest = -(-nbytes // wanted)
    found = []
    for positions in range(fewest, 2 * fewest + 1):
        chunk = nbytes // positions // granularity * granularity
        found.append((positions * chunk, -positions, chunk))
    _, positions, chunk = max(found)
    return -positions, chunk


class VmmSegment(CudaMemory):
    """Chunks of a GPU's memory that this process makes for a pool. See `memory.Growing`.

    Holds: addresses, until `close`; of each chunk a mapping and a descriptor, until `shrink`; a reference to the
    context. What a chunk is made with is released as soon as it is mapped, since mapping and descriptor hold the
    memory. A FABRIC handle is a name and holds nothing, so with those it is kept, until `shrink`, for others to find.
    """

    borrowed = True

    def __init__(self, device: CudaDevice, nbytes: int, chunk_nbytes: int, kind: HandleKind = "posix_fd") -> None:
        """Takes over the device. nbytes: a multiple of chunk_nbytes, and that one of the granularity."""
        super().__init__(device)
        self.nbytes, self.chunk_nbytes = nbytes, chunk_nbytes
        self._kind = kind
        self._space = _Space(device, nbytes, chunk_nbytes, borrowed=True)
        self.address = self._space.address
        self._handles: dict[int, Handle] = {}
        self._chunks: dict[int, int] = {}

    @classmethod
    def create(cls, nbytes: int, ordinal: int, chunk_nbytes: int, kind: HandleKind = "posix_fd") -> VmmSegment:
        """Addresses for a budget of nbytes, with nothing there. See `divided` for how it is cut.

        ordinal: of the GPU, among those that this process sees. Raises NoDriver, CudaError, BudgetTooSmall, NoFabric.
        """
        with ExitStack() as undo:
            device = CudaDevice(Driver.load(), ordinal)
            undo.callback(device.close)
            granularity = _granularity(device, kind)
            positions, chunk_nbytes = divided(nbytes, chunk_nbytes, granularity)
            if not positions:
                raise BudgetTooSmall(nbytes, granularity)
            segment = cls(device, positions * chunk_nbytes, chunk_nbytes, kind)
            undo.pop_all()
        return segment

    # --- chunks

    def grow(self, position: int) -> Handle:
        device = self.device
        chunk = device.call("create_chunk", device.ordinal, self.chunk_nbytes, self._kind)
        with ExitStack() as undo:
            undo.callback(device.call, "release_chunk", chunk)
            with ExitStack() as failed:
                handle: Handle = device.call("export_chunk", chunk, self._kind)
                failed.callback(let_go, handle)
                self._space.put(position, chunk)
                failed.pop_all()
            self._handles[position] = handle
            if self._kind == "fabric":
                self._chunks[position] = chunk
                undo.pop_all()
        return handle

    def shrink(self, position: int) -> None:
        let_go(self._handles.pop(position, None))
        if self._space.has(position):
            self._space.take(position)
        if position in self._chunks:
            self.device.call("release_chunk", self._chunks[position])
            del self._chunks[position]

    # --- as a pool's memory

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes:
        return self._space.view(offset, nbytes)

    def handle(self) -> GpuHandle | None:
        return GpuHandle(self.device.uuid.bytes, b"")

    def close(self) -> None:
        """Waits for the device; consumers keep the chunks that they have until they detach."""
        with ExitStack() as undo:
            undo.callback(self.device.close)
            undo.callback(self._space.close)
            for chunk in self._chunks.values():
                undo.callback(self.device.call, "release_chunk", chunk)
            for handle in self._handles.values():
                undo.callback(let_go, handle)
            self._chunks.clear()
            self._handles.clear()


class VmmImport(CudaMemory):
    """Another process's VmmSegment (or this one's own), as it is mapped here. See `memory.Arriving`.

    Holds: addresses, until `close`; of each chunk a mapping, until `unmap`. A reference to the context.
    """

    def __init__(
        self, device: CudaDevice, nbytes: int, chunk_nbytes: int, gpu: GpuHandle, kind: HandleKind = "posix_fd"
    ) -> None:
        """Takes over the device."""
        super().__init__(device)
        self.nbytes, self.chunk_nbytes = nbytes, chunk_nbytes
        self.borrowed = device.uuid.bytes == gpu.device
        self._kind = kind
        self._space = _Space(device, nbytes, chunk_nbytes, borrowed=self.borrowed)
        self.address = self._space.address

    @classmethod
    def attach(
        cls, gpu: GpuHandle, nbytes: int, chunk_nbytes: int, *, ordinal: int | None, kind: HandleKind = "posix_fd"
    ) -> VmmImport:
        """Addresses for a peer's chunks, with nothing there.

        ordinal: the device to have views on; None: the producer's own where this process sees it, or else this
        thread's current one. Raises AttachRefused, NoDriver, CudaError, NoFabric.
        """
        with ExitStack() as undo:
            device = CudaDevice.of(Driver.load(), gpu.device, ordinal)
            undo.callback(device.close)
            granularity = _granularity(device, kind)
            if not chunk_nbytes or chunk_nbytes % granularity or not nbytes or nbytes % chunk_nbytes:
                raise AttachRefused(
                    f"{nbytes} bytes in chunks of {chunk_nbytes} were announced; a chunk is a multiple of "
                    f"{granularity}, and a pool one of chunks"
                )
            imported = cls(device, nbytes, chunk_nbytes, gpu, kind)
            undo.pop_all()
        return imported

    # --- chunks

    def map(self, position: int, handle: Handle) -> None:
        chunk = self.device.call("import_chunk", handle, self._kind)
        try:
            self._space.put(position, chunk)
        finally:
            self.device.call("release_chunk", chunk)

    def unmap(self, position: int) -> None:
        self._space.take(position)

    def settle(self) -> None:
        self.device.call("synchronize_context")

    # --- as a pool's memory

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes:
        if self.borrowed:
            return self._space.view(offset, nbytes)
        return self.local(offset, nbytes, order)

    def close(self) -> None:
        """Waits for the device, if anything is mapped."""
        with ExitStack() as undo:
            undo.callback(self.device.close)
            undo.callback(self._space.close)


class _Space:
    """Reserved addresses, and the chunks that are mapped there."""

    def __init__(self, device: CudaDevice, nbytes: int, chunk_nbytes: int, *, borrowed: bool) -> None:
        """borrowed: whether views of these bytes are handed out; else they are on another device than torch's."""
        self._device, self._nbytes, self._chunk_nbytes = device, nbytes, chunk_nbytes
        self._borrowed = borrowed
        self.address: int = device.call("reserve", nbytes)
        self._mapped: set[int] = set()
        self._whole: Bytes = None

    def put(self, position: int, chunk: int) -> None:
        """Map a chunk, to be read and written from this device."""
        address = self.address + position * self._chunk_nbytes
        self._device.call("map", address, self._chunk_nbytes, chunk, self._device.ordinal)
        self._mapped.add(position)
        if position == 0 and self._borrowed and self._whole is None:
            try:  # torch asks the driver about a tensor's first byte, when it is made and never again
                self._whole = self._device.over(self.address, self._nbytes)
            except BaseException:  # interrupted, too: who asked for the chunk will take it for one that did not come
                self.take(position)
                raise

    def has(self, position: int) -> bool:
        return position in self._mapped

    def take(self, position: int) -> None:
        self._device.call("unmap", self.address + position * self._chunk_nbytes, self._chunk_nbytes)
        self._mapped.remove(position)

    def view(self, offset: int, nbytes: int) -> Bytes:
        if self._whole is None:  # the first position was not mapped yet
            return self._device.over(self.address + offset, max(1, nbytes))[:nbytes]
        return self._whole[offset : offset + nbytes]

    def close(self) -> None:
        self._whole = None
        with ExitStack() as undo:
            undo.callback(self._device.call, "give_up", self.address, self._nbytes)
            for position in self._mapped.copy():
                undo.callback(self.take, position)
            if self._mapped:
                self._device.call("synchronize_context")


def _granularity(device: CudaDevice, kind: HandleKind) -> int:
    """What the size of a chunk is a multiple of. Raises NoFabric where FABRIC chunks cannot be made here.

    That is found out by making one: before a pool is announced, and before a consumer says that it can read it.
    """
    try:
        granularity: int = device.call("granularity", device.ordinal, kind)
        if kind == "fabric":
            chunk = device.call("create_chunk", device.ordinal, granularity, kind)
            try:
                device.call("export_chunk", chunk, kind)
            finally:
                device.call("release_chunk", chunk)
    except CudaError as problem:
        if kind == "fabric" and not problem.sticky:
            raise NoFabric(str(problem)) from None
        raise
    return granularity
