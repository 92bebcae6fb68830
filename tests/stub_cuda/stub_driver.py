"""A stub of the CUDA driver, as cuda.bindings shows it: logs calls, fails where it is told to, shares real memory.

The folder $STUB_CUDA holds `plan.json`, which says what to be like, and takes `calls.log`, a line `pid call result` for
each call. "GPU memory" is files of that folder and memfds, mapped, so that what one process exports another one really
opens and reads. Structs and enums are the real ones. A plan has, all of it optional:

    gpus      list of {"name": ..., "mnnvl": ...}
    flags     attributes by name, 1 where not named: {"HANDLE_TYPE_FABRIC_SUPPORTED": 0}
    fail      CUresult names by call, perhaps with the kind of handle: {"cuMemCreate fabric": "CUDA_ERROR_UNKNOWN"}
    missing   true: as if there were no libcuda.so.1
    hang      calls that never return
    crash     calls that end the process by SIGSEGV
    garble    true: memory opened by another process reads as zeros
    deaf      true: words written by a stream never arrive
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import itertools
import json
import mmap
import os
import signal
import sys
from pathlib import Path

import cuda.bindings

FOLDER = Path(os.environ["STUB_CUDA"])
PLAN = json.loads((FOLDER / "plan.json").read_text())
GPUS = PLAN.get("gpus", [{"name": "NVIDIA H200"}])
FABRIC_NBYTES = 64


def _real():
    """The module that this one stands for: importing it takes no driver."""
    if __name__ == "stub_driver":  # beside the real one, in a test's own process
        from cuda.bindings import driver

        return driver
    spec = importlib.machinery.PathFinder.find_spec(__name__, cuda.bindings.__path__)
    module = importlib.util.module_from_spec(spec)
    ours, sys.modules[__name__] = sys.modules[__name__], module
    spec.loader.exec_module(module)
    sys.modules[__name__] = ours
    return module


real = _real()
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED, PROT_NONE, PROT_RW = 0x10, 0, mmap.PROT_READ | mmap.PROT_WRITE


def __getattr__(name):
    if not name.startswith("cu"):
        return getattr(real, name)
    if name not in CALLS:
        raise AttributeError(name)

    def call(*arguments):
        if PLAN.get("missing"):
            log(name, "no libcuda")
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        kind = kind_of(arguments)
        for key in (name, f"{name} {kind}"):
            if key in PLAN.get("hang", []):
                log(name, "hangs")
                signal.pause()
            if key in PLAN.get("crash", []):
                os.kill(os.getpid(), signal.SIGSEGV)
            if key in PLAN.get("fail", {}):
                log(name, PLAN["fail"][key])
                return (getattr(real.CUresult, PLAN["fail"][key]),) + (None,) * VALUES.get(name, 0)
        result = CALLS[name](*arguments)
        log(name, "ok")
        values = () if result is None else (result,)
        return (real.CUresult.CUDA_SUCCESS, *values)

    return call


def log(name, result):
    with open(FOLDER / "calls.log", "a") as file:
        file.write(f"{os.getpid()} {name} {result}\n")


def kind_of(arguments):
    kinds = real.CUmemAllocationHandleType
    for argument in arguments:
        kind = getattr(argument, "requestedHandleTypes", argument)
        if kind == kinds.CU_MEM_HANDLE_TYPE_FABRIC and isinstance(kind, kinds):
            return "fabric"
        if kind == kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR and isinstance(kind, kinds):
            return "posix_fd"
    return ""


# --- memory


def mapped(fd, nbytes, address=None, protection=PROT_RW):
    """An address; a private copy of zeros where the plan says that sharing garbles."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fixed = 0 if address is None else MAP_FIXED
    found = libc.mmap(address, nbytes, protection, flags | fixed, fd, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return found


numbers = itertools.count()
allocations = {}  #: address -> (nbytes, file or None)
chunks = {}  #: handle -> (descriptor, file or None, imported)


def new_file(nbytes):
    """A file whose name another process can be told in the 64 bytes of a handle."""
    path = FOLDER / f"m{os.getpid()}-{next(numbers)}"
    path.write_bytes(bytes(nbytes))
    return path


def allocate(nbytes):
    path = new_file(nbytes)
    fd = os.open(path, os.O_RDWR)
    address = mapped(fd, nbytes)
    os.close(fd)
    allocations[address] = nbytes, path
    return real.CUdeviceptr(address)


def free(pointer):
    nbytes, path = allocations.pop(int(pointer))
    libc.munmap(int(pointer), nbytes)
    path.unlink()


def ipc_export(pointer):
    handle = real.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), allocations[int(pointer)][1].name.encode().ljust(64, b"\0"), 64)
    return handle


def ipc_open(handle, flags):
    assert flags == 1, "a peer's memory needs LAZY_ENABLE_PEER_ACCESS"
    path = FOLDER / ctypes.string_at(handle.getPtr(), 64).rstrip(b"\0").decode()
    assert not path.name.startswith(f"m{os.getpid()}-"), "CUDA cannot open what this process has exported"
    nbytes = path.stat().st_size
    fd = -1 if PLAN.get("garble") else os.open(path, os.O_RDWR)
    address = mapped(fd, nbytes)
    if fd >= 0:
        os.close(fd)
    allocations[address] = nbytes, None
    return real.CUdeviceptr(address)


def ipc_close(pointer):
    nbytes, _ = allocations.pop(int(pointer))
    libc.munmap(int(pointer), nbytes)


def create(nbytes, prop, flags):
    assert nbytes % GRANULARITY == 0
    if kind_of((prop,)) == "fabric":
        path = new_file(nbytes)
        handle = os.open(path, os.O_RDWR)
    else:
        path, handle = None, os.memfd_create("stub-chunk")
        os.ftruncate(handle, nbytes)
    chunks[handle] = path, False
    return real.CUmemGenericAllocationHandle(handle)


def release(handle):
    path, imported = chunks.pop(int(handle))
    os.close(int(handle))
    if path is not None and not imported:
        path.unlink()


def export(handle, kind, flags):
    path, _ = chunks[int(handle)]
    if path is None:
        return os.dup(int(handle))
    shareable = real.CUmemFabricHandle()
    shareable.data = path.name.encode().ljust(FABRIC_NBYTES, b"\0")
    return shareable


def import_(shareable, kind):
    if kind_of((kind,)) == "fabric":
        path = FOLDER / ctypes.string_at(shareable, FABRIC_NBYTES).rstrip(b"\0").decode()
        handle = os.open(path, os.O_RDWR)
    else:
        path, handle = None, os.dup(shareable)
    chunks[handle] = path, True
    return real.CUmemGenericAllocationHandle(handle)


def map_(address, nbytes, offset, handle, flags):
    fd = -1 if PLAN.get("garble") and chunks[int(handle)][1] else int(handle)
    mapped(fd, nbytes, int(address))


def write_word(stream, pointer, value, flags):
    if not PLAN.get("deaf"):
        ctypes.c_uint32.from_address(int(pointer)).value = value


def uuid(device):
    made = real.CUuuid()
    ctypes.memset(made.getPtr(), device + 1, 16)
    return made


GRANULARITY = 1 << 21
VALUES = {"cuMemCreate": 1, "cuMemAlloc": 1}
CALLS = {
    "cuInit": lambda flags: None,
    "cuDriverGetVersion": lambda: 13000,
    "cuDeviceGetCount": lambda: len(GPUS),
    "cuDeviceGetName": lambda length, device: GPUS[device]["name"].encode().ljust(length, b"\0"),
    "cuDeviceGetUuid": uuid,
    "cuDeviceGetAttribute": lambda attribute, device: PLAN.get("flags", {}).get(
        attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0 if "MPS" in attribute.name else 1
    ),
    "cuDeviceCanAccessPeer": lambda device, peer: int(PLAN.get("peers", True)),
    "cuDevicePrimaryCtxRetain": lambda device: real.CUcontext(0x1234),
    "cuDevicePrimaryCtxRelease": lambda device: None,
    "cuCtxPushCurrent": lambda context: None,
    "cuCtxPopCurrent": lambda: real.CUcontext(0x1234),
    "cuCtxSynchronize": lambda: None,
    "cuMemAlloc": allocate,
    "cuMemFree": free,
    "cuMemsetD8": lambda pointer, byte, nbytes: ctypes.memset(int(pointer), byte, nbytes) and None,
    "cuMemcpyDtoH": lambda to, pointer, nbytes: ctypes.memmove(to, int(pointer), nbytes) and None,
    "cuIpcGetMemHandle": ipc_export,
    "cuIpcOpenMemHandle": ipc_open,
    "cuIpcCloseMemHandle": ipc_close,
    "cuMemGetAllocationGranularity": lambda prop, option: GRANULARITY,
    "cuMemCreate": create,
    "cuMemRelease": release,
    "cuMemExportToShareableHandle": export,
    "cuMemImportFromShareableHandle": import_,
    # As on a GPU, touching what is not mapped ends the process.
    "cuMemAddressReserve": lambda nbytes, alignment, address, flags: real.CUdeviceptr(
        mapped(-1, nbytes, None, PROT_NONE)
    ),
    "cuMemAddressFree": lambda address, nbytes: libc.munmap(int(address), nbytes) and None,
    "cuMemMap": map_,
    "cuMemSetAccess": lambda address, nbytes, access, count: None,
    "cuMemUnmap": lambda address, nbytes: mapped(-1, nbytes, int(address), PROT_NONE) and None,
    "cuMemHostRegister": lambda address, nbytes, flags: None,
    "cuMemHostGetDevicePointer": lambda address, flags: real.CUdeviceptr(address),
    "cuMemHostUnregister": lambda address: None,
    "cuStreamCreate": lambda flags: real.CUstream(0x77),
    "cuStreamDestroy": lambda stream: None,
    "cuStreamSynchronize": lambda stream: None,
    "cuStreamIsCapturing": lambda stream: real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE,
    "cuStreamWriteValue32": write_word,
    "cuStreamWaitValue32": lambda stream, pointer, value, flags: None,
}

log("import", "ok")
