"""Tensors as bytes: the dtype table, the checks of a header, and views over memory that another object owns.

Imports without torch; `View.torch()` imports it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import BadTensor, UnsupportedDtype
from tensorferry.codecs.memory.host import HOST_ORDER
from tensorferry.codecs.memory.memory import Bytes, Order
from tensorferry.codecs.memory.pinned import pinned_copy

if TYPE_CHECKING:
    import torch

#: Every dense dtype of torch that can be ferried -> bytes per element. The names are torch's own without
#: the `torch.` prefix. Quantised, bit-field and sub-byte dtypes are not dense arrays and are refused by name;
#: `float4_e2m1fn_x2` is a byte that packs two values, so it is dense. A dtype's place in this table is its code on the
#: wire, so new ones go to the end.
DTYPES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
CODES = {name: code for code, name in enumerate(DTYPES)}
_NAMES = tuple(DTYPES)
#: The dtypes of the table that numpy has too, under the same name.
NUMPY_DTYPES = {name: np.dtype(name) for name in DTYPES if name in np.sctypeDict}
#: And back: numpy takes 4 us to spell a dtype's name. One in foreign byte order is not in here.
_NUMPY_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

#: Where every tensor in a pool starts: enough for any dtype, a cache line, and the widest vector store.
ALIGNMENT = 64
MAX_DIMENSIONS = 8
MAX_NBYTES = 1 << 40  # 1 TiB: above every pool; below it no product of ours overflows 64 bits


def dtype_of(code: int) -> str:
    """The dtype a payload names by its code. Raises UnsupportedDtype."""
    if not 0 <= code < len(_NAMES):
        raise UnsupportedDtype(f"number {code}")
    return _NAMES[code]


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor. Raises UnsupportedDtype or BadTensor; allocates nothing.

    Written for numbers that a peer supplied: the product is taken in Python integers, so it cannot overflow.
    """
    itemsize = DTYPES.get(dtype)
    if itemsize is None:
        raise UnsupportedDtype(dtype)
    if len(shape) > MAX_DIMENSIONS:
        raise BadTensor(f"{len(shape)} dimensions; at most {MAX_DIMENSIONS} can be ferried")
    nbytes, span = itemsize, itemsize
    for extent in shape:
        if extent < 0:
            raise BadTensor(f"shape {shape} has a negative extent")
        nbytes *= extent
        span *= extent or 1  # numpy and torch count a zero extent as one when they lay out the others
    if span > MAX_NBYTES:
        raise BadTensor(f"shape {shape} of {dtype} spans {span} bytes; at most {MAX_NBYTES} can be ferried")
    return nbytes


class View:
    """A dense tensor over bytes that another object owns.

    `data` is a one-dimensional uint8 array over the bytes (a torch tensor if they are in GPU memory); it, and
    whatever `numpy()` and `torch()` return, is valid only as long as the lease or message it came from. A
    consumer's view of a host pool is mapped read-only: numpy raises ValueError at a store, and torch, which knows no
    such tensors, ends in a segmentation fault, not in a silent change.
    In GPU memory it is valid for what is queued on the stream that was current when the view was handed out; call
    `join` after queueing reads or writes of it on another one.
    """

    __slots__ = ("_order", "_read_only", "data", "dtype", "shape")

    def __init__(
        self,
        data: Bytes,
        dtype: str,
        shape: tuple[int, ...],
        order: Order = HOST_ORDER,
        *,
        read_only: bool = False,
    ) -> None:
        nbytes = nbytes_of(dtype, shape)
        if data.nbytes != nbytes:
            raise BadTensor(f"shape {shape} of {dtype} needs {nbytes} bytes, not {data.nbytes}")
        self.data, self.dtype, self.shape = data, dtype, shape
        self._order, self._read_only = order, read_only

    def __repr__(self) -> str:
        return f"View({self.dtype}, {self.shape})"

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def on_host(self) -> bool:
        return isinstance(self.data, np.ndarray)

    def join(self) -> None:
        """Count all work of this thread's current stream so far as work on these bytes: no lease ends before it is
        done. For GPU memory; on the host a no-op."""
        self._order.join()

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor as a numpy array over the same bytes. Raises UnsupportedDtype for bfloat16 and others, and for
        a tensor in GPU memory."""
        if not self.on_host:
            raise UnsupportedDtype(self.dtype, f"on {self.data.device} is no numpy array; use .torch()")
        dtype = NUMPY_DTYPES.get(self.dtype)
        if dtype is None:
            raise UnsupportedDtype(self.dtype, "is none of numpy's; use .torch()")
        array: npt.NDArray[Any] = self.data.view(dtype).reshape(self.shape)
        if self._read_only:
            array.flags.writeable = False
        return array

    def torch(self) -> torch.Tensor:
        """The tensor as a torch tensor over the same bytes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)  # a name of our own table
        data = self.data
        if self.on_host:
            from torch.utils.dlpack import from_dlpack

            if not data.nbytes:
                return torch.empty(self.shape, dtype=dtype)
            # Not from_numpy, which warns of read-only memory, and that is what a consumer maps.
            data = from_dlpack(data)
        tensor: torch.Tensor = data if self.dtype == "uint8" else data.view(dtype)  # each view takes a microsecond
        return tensor if self.shape == tensor.shape else tensor.view(self.shape)

    @classmethod
    def empty(cls, dtype: str, shape: tuple[int, ...], device: int | None = None) -> View:
        """A tensor of private memory, its bytes not set: of the host, or of a GPU, as torch counts them."""
        nbytes = nbytes_of(dtype, shape)
        if device is None:
            return cls(np.empty(nbytes, np.uint8), dtype, shape)
        import torch

        return cls(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}"), dtype, shape)

    def rows(self, start: int, stop: int) -> View:
        """Rows `start` to `stop` of a tensor of one dimension at least, over the same bytes."""
        nbytes = self.nbytes // self.shape[0] if self.shape[0] else 0
        shape = (stop - start, *self.shape[1:])
        data = self.data[start * nbytes : stop * nbytes]
        return View(data, self.dtype, shape, self._order, read_only=self._read_only)

    def host(self) -> View:
        """The same tensor in host memory: this one, or a copy of GPU memory, which this thread waits for."""
        return self if self.on_host else View(self.data.cpu().numpy(), self.dtype, self.shape)

    def copy(self) -> View:
        """The same tensor in private memory, of the host or of the same GPU."""
        return View(self.data.copy() if self.on_host else self.data.clone(), self.dtype, self.shape)

    def copy_from(self, source: View) -> None:
        """Copy another tensor of the same dtype and shape into these bytes.

        Into GPU memory on this thread's current stream, and of both views' leases neither ends before that is done; a
        host source may change at once. Raises BadTensor, also for GPU bytes that should go into host memory, which
        cannot be had without waiting.
        """
        if (source.dtype, source.shape) != (self.dtype, self.shape):
            raise BadTensor(f"cannot copy {source!r} into {self!r}")
        if self.on_host:
            if not source.on_host:
                raise BadTensor(f"cannot copy {source!r} of {source.data.device} into host memory without waiting")
            np.copyto(self.data, source.data)
            return
        self.data.copy_(pinned_copy(source.data) if source.on_host else source.data, non_blocking=True)
        self.join()
        source.join()


def view_of(tensor: Any) -> View:
    """A View over a torch tensor (in host or CUDA memory), numpy array or View; copies only what is not contiguous.

    Raises UnsupportedDtype for what the table lacks and for tensors that are sparse or elsewhere. Bits are kept: NaN
    payloads and -0.0 survive.
    """
    if isinstance(tensor, View):
        return tensor
    if isinstance(tensor, np.ndarray):
        known = _NUMPY_NAMES.get(tensor.dtype)
        if known is None:
            raise UnsupportedDtype(f"numpy {tensor.dtype.str}")
        shape = tensor.shape  # ascontiguousarray makes a 0-d array 1-d
        return View(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8), known, shape)
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedDtype(type(tensor).__name__)
    name = str(tensor.dtype).removeprefix("torch.")
    elsewhere = tensor.device.type not in ("cpu", "cuda")
    if name not in DTYPES or tensor.layout != torch.strided or elsewhere or tensor.is_nested:
        raise UnsupportedDtype(f"{name} ({'nested' if tensor.is_nested else tensor.layout}, {tensor.device})")
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not dense.numel() and not tensor.is_cuda:
        return View(np.empty(0, np.uint8), name, tuple(tensor.shape))
    # Not reshape(-1): of a single element torch calls any stride contiguous, and keeps it.
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    return View(flat if tensor.is_cuda else flat.numpy(), name, tuple(tensor.shape))
