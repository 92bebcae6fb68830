"""Tensors as bytes: the dtype table, the checks of a header, and views over memory somebody else owns.

Imports without torch; `View.torch()` imports it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import BadTensor, UnsupportedDtype

if TYPE_CHECKING:
    import torch

#: Every dense dtype of torch that can be ferried -> bytes per element. The names are torch's own without
#: the `torch.` prefix. Quantised, bit-field and sub-byte dtypes are not dense arrays and are refused by name;
#: `float4_e2m1fn_x2` is a byte that packs two values, so it is dense.
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
#: The dtypes of the table that numpy has too, under the same name.
NUMPY_DTYPES = {name: np.dtype(name) for name in DTYPES if name in np.sctypeDict}
#: And back: numpy takes 4 us to spell a dtype's name. One in foreign byte order is not in here.
_NUMPY_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

#: Where every tensor in a pool starts: enough for any dtype, a cache line, and the widest vector store.
ALIGNMENT = 64
MAX_DIMENSIONS = 8
MAX_NBYTES = 1 << 40  # 1 TiB: above every pool; below it no product of ours overflows 64 bits


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
    """A dense tensor over bytes that somebody else owns.

    `data` is a one-dimensional uint8 array over the bytes; it, and whatever `numpy()` and `torch()` return,
    is valid only as long as the lease or message it came from. A consumer's view of a host pool is mapped
    read-only: a store through it is a segmentation fault, not a silent change.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> None:
        nbytes = nbytes_of(dtype, shape)
        if data.nbytes != nbytes:
            raise BadTensor(f"shape {shape} of {dtype} needs {nbytes} bytes, not {data.nbytes}")
        self.data, self.dtype, self.shape = data, dtype, shape

    def __repr__(self) -> str:
        return f"View({self.dtype}, {self.shape})"

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor as a numpy array over the same bytes. Raises UnsupportedDtype for bfloat16 and others."""
        dtype = NUMPY_DTYPES.get(self.dtype)
        if dtype is None:
            raise UnsupportedDtype(f"{self.dtype} (as a numpy array; use .torch())")
        return self.data.view(dtype).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """The tensor as a torch tensor over the same bytes."""
        import torch
        from torch.utils.dlpack import from_dlpack

        dtype: torch.dtype = getattr(torch, self.dtype)  # a name of our own table
        if not self.data.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        # Not from_numpy, which warns of read-only memory, and that is what a consumer maps.
        return from_dlpack(self.data).view(dtype).view(self.shape)

    @classmethod
    def empty(cls, dtype: str, shape: tuple[int, ...]) -> View:
        """A tensor of private memory, its bytes not set."""
        return cls(np.empty(nbytes_of(dtype, shape), np.uint8), dtype, shape)

    def copy(self) -> View:
        """The same tensor in private memory."""
        return View(self.data.copy(), self.dtype, self.shape)

    def copy_from(self, source: View) -> None:
        """Copy another tensor of the same dtype and shape into these bytes."""
        if (source.dtype, source.shape) != (self.dtype, self.shape):
            raise BadTensor(f"cannot copy {source!r} into {self!r}")
        np.copyto(self.data, source.data)


def view_of(tensor: Any) -> View:
    """A View over a torch tensor, numpy array or View on the host; copies only what is not contiguous.

    Raises UnsupportedDtype for what the table lacks and for tensors that are sparse or elsewhere than in
    host memory. Bits are kept: NaN payloads and -0.0 survive.
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
    if name not in DTYPES or tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
        raise UnsupportedDtype(f"{name} ({'nested' if tensor.is_nested else tensor.layout}, {tensor.device})")
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return View(np.empty(0, np.uint8), name, tuple(tensor.shape))
    # Not reshape(-1): of a single element torch calls any stride contiguous, and keeps it.
    flat = dense.as_strided((dense.numel(),), (1,))
    return View(flat.view(torch.uint8).numpy(), name, tuple(tensor.shape))
