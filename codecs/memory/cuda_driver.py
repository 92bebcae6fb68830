"""The CUDA driver: every call to it goes through here, is checked, and says its name when it fails.

`Driver.load` is the first thing that touches CUDA; a process that does not call it has no libcuda and no context. The
methods are the few things a pool, a reader and a probe need, in plain values: a pointer, stream or handle is an int,
a shareable handle 64 bytes or a descriptor. They keep no record of what they take: their caller gives it back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal
from uuid import UUID

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.memory.fork_guard import close_in_forked_children

HandleKind = Literal["posix_fd", "fabric"]

IPC_HANDLE_NBYTES = 64  #: of a CUDA IPC handle and of a FABRIC handle alike
#: CU_MEMHOSTREGISTER_DEVICEMAP, and with READ_ONLY: DEVICEMAP alone is refused on a read-only mapping (H200, 580.159).
_DEVICEMAP, _READ_ONLY = 0x02, 0x08
_NOT_READY = 600  #: CUDA_ERROR_NOT_READY

#: After these the context is dead and every later call in this process fails too.
#: Source: CUDA driver API, CUresult ("the process must be terminated and relaunched").
STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC"),
        *("LAUNCH_FAILED", "LAUNCH_TIMEOUT", "HARDWARE_STACK_ERROR", "ASSERT", "ECC_UNCORRECTABLE"),
        *("NVLINK_UNCORRECTABLE", "CONTAINED", "EXTERNAL_DEVICE", "TENSOR_MEMORY_LEAK", "MPS_CLIENT_TERMINATED"),
        "CONTEXT_IS_DESTROYED",
    )
)


_LOST_TEXTS = (
    *("illegal memory access", "misaligned address", "unspecified launch failure", "illegal instruction"),
    *("device-side assert", "hardware stack error", "invalid program counter", "launch timed out"),
    *("invalid address space", "uncorrectable ECC error", "uncorrectable NVLink error", "context is destroyed"),
    "OS call failed",  # the driver lacks descriptors or memory: not for ever, but one operation fails after the other
)


class NoDriver(FerryError):
    """CUDA cannot be used in this process at all."""

    def __init__(self, problem: str, missing: bool = False) -> None:
        super().__init__(problem, missing)
        self.problem, self.missing = problem, missing

    def __str__(self) -> str:
        return self.problem


class CudaError(FerryError):
    """A driver call failed: `call` is its name, `name` that of the CUresult."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(call, name)
        self.call, self.name = call, name

    def __str__(self) -> str:
        return f"{self.call}: {self.name}"

    @property
    def sticky(self) -> bool:
        """Whether the context is lost, so that this process can only end."""
        return self.name in STICKY


def lost_context(problem: BaseException) -> BaseException | None:
    """The problem, or one of its group, after which all GPU work of this process fails, in our words or in torch's.

    Source of those: torch raises AcceleratorError, a RuntimeError, whose first line is "CUDA error: " and
    cudaGetErrorString. The lines after it name all sorts of things that are not the matter.
    """
    if isinstance(problem, BaseExceptionGroup):
        return next(filter(None, map(lost_context, problem.exceptions)), None)
    if isinstance(problem, CudaError):
        return problem if problem.sticky else None
    line = str(problem).partition("\n")[0] if isinstance(problem, RuntimeError) else ""
    return problem if "CUDA error: " in line and any(words in line for words in _LOST_TEXTS) else None


class NotLoaded(CudaError):
    """This process has no such function: there is no libcuda, or an older one."""


def check(call: str, outcome: tuple[Any, ...]) -> Any:
    """What a call of cuda.bindings returned beside its CUresult: nothing, a value or a tuple. Raises CudaError."""
    result = outcome[0]
    if int(result) != 0:
        raise CudaError(call, getattr(result, "name", f"CUresult {int(result)}"))
    if len(outcome) == 1:  # so do the calls of every hand-over
        return None
    return outcome[1] if len(outcome) == 2 else outcome[1:]


class Driver:
    """The driver of this process. Made by `load`; tests give it bindings of their own."""

    def __init__(self, bindings: Any) -> None:
        self._cuda = bindings

    @classmethod
    def load(cls) -> Driver:
        """Load libcuda and initialise it; opens no context. Raises NoDriver.

        From now on children that Python forks from this process close the descriptors of the driver: see `forked`.
        """
        try:
            from cuda.bindings import driver as bindings
        except ImportError as problem:
            raise NoDriver(f"cuda-python cannot be imported: {problem}", missing=True) from None
        self = cls(bindings)
        try:
            self.call("cuInit", 0)
        except NotLoaded:
            raise NoDriver("libcuda.so.1 cannot be loaded", missing=True) from None
        except CudaError as problem:
            raise NoDriver(str(problem), missing=problem.name == "CUDA_ERROR_NO_DEVICE") from None
        close_in_forked_children()
        return self

    def call(self, name: str, *arguments: Any) -> Any:
        """Make any driver call by its name. Raises CudaError, also where driver or cuda-python have no such call."""
        function = getattr(self._cuda, name, None)
        if function is None:
            raise NotLoaded(name, "not in this cuda-python")
        try:
            outcome = function(*arguments)
        except RuntimeError as problem:  # cuda.bindings: no libcuda, or no such function in it
            raise NotLoaded(name, str(problem).partition("\n")[0]) from None
        return check(name, outcome)

    # --- devices

    def version(self) -> int:
        """Of the driver API: 13000 is 13.0."""
        return int(self.call("cuDriverGetVersion"))

    def device_count(self) -> int:
        return int(self.call("cuDeviceGetCount"))

    def name(self, device: int) -> str:
        return bytes(self.call("cuDeviceGetName", 256, device)).split(b"\0")[0].decode("ascii", "replace")

    def uuid(self, device: int) -> UUID:
        """Of the GPU, or of the MIG instance where that is what this process was given."""
        return UUID(bytes=bytes(self.call("cuDeviceGetUuid", device).bytes))

    def attribute(self, device: int, name: str) -> int:
        """name: as in CUdevice_attribute, without CU_DEVICE_ATTRIBUTE_."""
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, device))

    def can_reach(self, device: int, peer: int) -> bool:
        """Whether `device` says it can read the memory of `peer`."""
        return bool(self.call("cuDeviceCanAccessPeer", device, peer))

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The primary context of a device, which torch uses too, current on this thread for the length of the block."""
        context = self.call("cuDevicePrimaryCtxRetain", device)
        try:
            self.call("cuCtxPushCurrent", context)
            try:
                yield
            finally:
                with suppress(CudaError):  # of a context that has died meanwhile
                    self.call("cuCtxPopCurrent")
        finally:
            with suppress(CudaError):
                self.call("cuDevicePrimaryCtxRelease", device)

    # --- memory

    def allocate(self, nbytes: int) -> int:
        return int(self.call("cuMemAlloc", nbytes))

    def free(self, pointer: int) -> None:
        """Waits for a stream that is held on a wait; so do `ipc_close` and `unregister`. Keep them off event loops."""
        self.call("cuMemFree", pointer)

    def fill(self, pointer: int, byte: int, nbytes: int) -> None:
        self.call("cuMemsetD8", pointer, byte, nbytes)

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Copy device memory to the host, and wait for it."""
        copy = (ctypes.c_char * nbytes)()
        self.call("cuMemcpyDtoH", ctypes.addressof(copy), pointer, nbytes)
        return copy.raw

    # --- legacy IPC

    def ipc_export(self, pointer: int) -> bytes:
        """The handle of a whole allocation. It cannot be opened in the process that exported it."""
        handle = self.call("cuIpcGetMemHandle", pointer)  # owns the bytes: it must live until they are copied
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation under the current device, a peer of its own included."""
        given = self._cuda.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, IPC_HANDLE_NBYTES)
        lazy_peer_access = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self.call("cuIpcOpenMemHandle", given, int(lazy_peer_access)))

    def ipc_close(self, pointer: int) -> None:
        self.call("cuIpcCloseMemHandle", pointer)

    # --- virtual memory

    def granularity(self, device: int, kind: HandleKind) -> int:
        """What the size of a chunk is a multiple of."""
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._chunk(device, kind), minimum))

    def create_chunk(self, device: int, nbytes: int, kind: HandleKind) -> int:
        """Physical memory that can be shared by handles of this kind; mapped nowhere yet."""
        return int(self.call("cuMemCreate", nbytes, self._chunk(device, kind), 0))

    def release_chunk(self, chunk: int) -> None:
        """The memory goes once no process has it mapped, or holds its handle or a descriptor of it."""
        self.call("cuMemRelease", chunk)

    def export_chunk(self, chunk: int, kind: HandleKind) -> int | bytes:
        """A new descriptor, the caller's to close, or a FABRIC handle."""
        shareable = self.call("cuMemExportToShareableHandle", chunk, self._kind(kind), 0)
        return int(shareable) if kind == "posix_fd" else bytes(shareable.data)

    def import_chunk(self, shareable: int | bytes, kind: HandleKind) -> int:
        """Another process's chunk. The caller keeps the descriptor, and closes it at once: it holds the memory."""
        if isinstance(shareable, bytes):
            handle = self._cuda.CUmemFabricHandle()
            handle.data = shareable
            shareable = int(handle.getPtr())
        return int(self.call("cuMemImportFromShareableHandle", shareable, self._kind(kind)))

    def reserve(self, nbytes: int) -> int:
        """Address space without memory."""
        return int(self.call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def give_up(self, address: int, nbytes: int) -> None:
        """Undo `reserve`."""
        self.call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, chunk: int, device: int) -> None:
        """Put a whole chunk at a reserved address, readable and writable from `device`."""
        self.call("cuMemMap", address, nbytes, 0, chunk, 0)
        access = self._cuda.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self.call("cuMemSetAccess", address, nbytes, [access], 1)
        except CudaError:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Never waits: work that is queued on these bytes then kills the context (seen on an H200)."""
        self.call("cuMemUnmap", address, nbytes)

    def _location(self, device: int) -> Any:
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location

    def _kind(self, kind: HandleKind) -> Any:
        kinds = self._cuda.CUmemAllocationHandleType
        if kind == "fabric":
            return kinds.CU_MEM_HANDLE_TYPE_FABRIC
        return kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _chunk(self, device: int, kind: HandleKind) -> Any:
        chunk = self._cuda.CUmemAllocationProp()
        chunk.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        chunk.location = self._location(device)
        chunk.requestedHandleTypes = self._kind(kind)
        return chunk

    # --- host pages and words

    def register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        """Let the GPU reach host memory; returns where. read_only: for a mapping of another process's sealed page."""
        self.call("cuMemHostRegister", address, nbytes, _DEVICEMAP | (_READ_ONLY if read_only else 0))
        try:
            return int(self.call("cuMemHostGetDevicePointer", address, 0))
        except CudaError:
            self.unregister(address)
            raise

    def unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""
        return int(self.call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def destroy(self, stream: int) -> None:
        self.call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def synchronize_context(self) -> None:
        """Wait for all work of the current context, in every stream."""
        self.call("cuCtxSynchronize")

    def is_capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being recorded: a wait or write would then bake its value in."""
        return int(self.call("cuStreamIsCapturing", stream)) != 0

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """A block in which this thread may do what a graph that another thread captures does not depend on.

        In a thread's usual mode, asking a stream or an event is refused meanwhile, and ends that capture (seen on an
        H200); so is making page-locked memory.
        """
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", mode)

    def write_word(self, stream: int, pointer: int, value: int) -> None:
        """Store 32 bits once everything queued on the stream so far is done and visible."""
        self.call("cuStreamWriteValue32", stream, pointer, value, 0)

    def write_word_if_busy(self, stream: int, pointer: int, value: int) -> bool:
        """As `write_word`; False, and nothing done, where the stream has nothing left that the word would come after.

        Never False for a stream that comes after the default one's work too, which may not be over.
        """
        if stream and self._is_done("cuStreamQuery", stream):
            apart = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
            if int(self.call("cuStreamGetFlags", stream)) == int(apart):
                return False
        self.write_word(stream, pointer, value)
        return True

    def wait_word(self, stream: int, pointer: int, value: int) -> None:
        """Hold the stream until the word is at least `value`, by cyclic comparison."""
        at_least = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self.call("cuStreamWaitValue32", stream, pointer, value, int(at_least))

    # --- order between streams, copies in one

    def event(self) -> int:
        """A new event, which remembers no time."""
        return int(self.call("cuEventCreate", int(self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def happened(self, event: int) -> bool:
        """Whether all that the event was recorded after is done."""
        return self._is_done("cuEventQuery", event)

    def wait_event(self, stream: int, event: int) -> None:
        """What the stream is given from now on comes after the event."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def forget(self, event: int) -> None:
        """Give an event back; what already waits for it goes on waiting."""
        self.call("cuEventDestroy", event)

    def copy(self, into: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on a stream, from and to wherever the addresses are, a peer GPU too."""
        self.call("cuMemcpyAsync", into, source, nbytes, stream)

    def _is_done(self, query: str, asked: int) -> bool:
        """Ask without an exception, and without a block: either would cost more than the query, and this is asked for
        every hand-over. See `beside_captures`."""
        exchange = self._cuda.cuThreadExchangeStreamCaptureMode
        mode = exchange(self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)[1]
        try:
            result = getattr(self._cuda, query)(asked)[0]
        finally:
            exchange(mode)
        if int(result) == _NOT_READY:
            return False
        check(query, (result,))
        return True

    def extent(self, pointer: int) -> int:
        """Bytes of the allocation that begins here."""
        return int(self.call("cuMemGetAddressRange", pointer)[1])
