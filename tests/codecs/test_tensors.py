"""L9, B29: every dense dtype, any shape and strides, through the pool and inline, with the very same bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tensorferry.codecs import frames
from tensorferry.codecs.errors import BadTensor, UnsupportedDtype
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.codecs.messages import Embedding, Embeddings, Origin, Payload, Tensor
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import DTYPES, MAX_NBYTES, NUMPY_DTYPES, View, nbytes_of, view_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SHAPES = [(), (0,), (0, 3, 224, 224), (1,), (3, 5)]
Bytes = npt.NDArray[np.uint8]


def noise(nbytes: int, dtype: str) -> Bytes:
    """Bytes that hold every trap: NaN payloads, -0.0, subnormals, infinities; for bool only 0 and 1."""
    traps = np.frombuffer(
        np.array([0x7FC00001, 0xFFC00002, 0x80000000, 0x00000001, 0x7F800000, 0x7F817F81], "<u4").tobytes(), np.uint8
    )
    raw = np.resize(np.concatenate([traps, np.arange(251, dtype=np.uint8)]), nbytes)
    return raw % 2 if dtype == "bool" else raw


def with_layout(layout: str, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Any]) -> Any:
    """A tensor of this shape whose elements lie in memory as `layout` says; numpy and torch alike."""
    count = prod(shape)
    match layout:
        case "contiguous":
            return make(shape)
        case "transposed":
            flat = make(shape[::-1])
            return flat.transpose() if isinstance(flat, np.ndarray) else flat.permute(tuple(range(flat.ndim))[::-1])
        case "every second column":
            return make((*shape[:-1], shape[-1] * 2))[..., ::2] if shape else make((2,))[::2].reshape(())
        case "expanded":
            one = make((1,) * len(shape))
            return np.broadcast_to(one, shape) if isinstance(one, np.ndarray) else one.expand(shape)
        case "offset by one":
            return make((count + 1,))[1:].reshape(shape)
    raise AssertionError(layout)


LAYOUTS = ["contiguous", "transposed", "every second column", "expanded", "offset by one"]


class Ferry:
    """Both ways a tensor travels, within one process: through a pool and inline through encoded frames."""

    def __init__(self, pool: Pool, reader: Reader, column: int) -> None:
        self.reader, self.column = reader, column
        self.publisher = Publisher(pool, inline_below_nbytes=0)

    def through_pool(self, tensor: Any, look: Callable[[View], Any]) -> Any:
        with self.publisher.publish(tensor) as draft:
            message, inline = self.sent(draft.dispatch(self.column, []), [])
        assert not inline
        with self.reader.open(message.items[0].outputs[0].payload) as view:
            return look(view)

    def inline(self, tensor: Any, look: Callable[[View], Any]) -> Any:
        with Publisher(None).publish(tensor) as draft:
            sending: list[Buffer] = []
            message, inline = self.sent(draft.dispatch(None, sending), sending)
        with self.reader.open(message.items[0].outputs[0].payload, inline) as view:
            return look(view)

    @staticmethod
    def sent(payloads: list[Payload], inline: list[Buffer]) -> tuple[Embeddings, list[bytes]]:
        """What arrives of a message that carries them: bytes objects, as a socket would give."""
        outputs = tuple(Tensor("pixels", payload) for payload in payloads)
        message = Embeddings(bytes(16), 0, 1, Origin("encoder", 0, 1), (Embedding(0, 1, outputs),), ())
        wire = [bytes(memoryview(frame)) for frame in frames.encode(message, inline)]
        decoded, rest = frames.decode(wire, Limits())
        assert isinstance(decoded, Embeddings)
        return decoded, [bytes(frame) for frame in rest]


@pytest.fixture(scope="module")
def ferry() -> Iterator[Ferry]:
    with Pool.create(1 << 20, 8) as pool, Reader() as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        yield Ferry(pool, reader, column)
        pool.reclaim()
        assert pool.statistics().lent_slots == 0


def raw_of(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order, taken one element at a time: not the way the code does it."""
    itemsize = tensor.element_size()
    flat = tensor.detach()
    storage = bytes(flat.untyped_storage())
    offsets = [
        flat.storage_offset() + sum(i * stride for i, stride in zip(index, flat.stride(), strict=True))
        for index in np.ndindex(*flat.shape)
    ]
    return b"".join(storage[offset * itemsize : (offset + 1) * itemsize] for offset in offsets)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["through_pool", "inline"])
def test_l9_torch(ferry: Ferry, way: str, dtype: str) -> None:
    def make(shape: tuple[int, ...]) -> torch.Tensor:
        nbytes = nbytes_of(dtype, shape)
        kind: torch.dtype = getattr(torch, dtype)
        flat = torch.from_numpy(noise(nbytes, dtype)).view(kind) if nbytes else torch.empty(0, dtype=kind)
        return flat.reshape(shape)

    def look(view: View) -> tuple[torch.dtype, tuple[int, ...], bytes]:
        tensor = view.torch()
        assert tensor.is_contiguous()
        return tensor.dtype, tuple(tensor.shape), raw_of(tensor)

    for shape in SHAPES:
        for layout in LAYOUTS:
            tensor = with_layout(layout, shape, make)
            assert tuple(tensor.shape) == shape
            assert getattr(ferry, way)(tensor, look) == (tensor.dtype, shape, raw_of(tensor)), (shape, layout)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("way", ["through_pool", "inline"])
def test_l9_numpy(ferry: Ferry, way: str, dtype: str) -> None:
    def make(shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return noise(nbytes_of(dtype, shape), dtype).view(dtype).reshape(shape)

    def look(view: View) -> tuple[np.dtype[Any], tuple[int, ...], bytes]:
        array = view.numpy()
        assert array.flags.aligned
        assert array.flags.c_contiguous
        return array.dtype, array.shape, array.tobytes()

    for shape in SHAPES:
        for layout in LAYOUTS:
            array = with_layout(layout, shape, make)
            assert array.shape == shape
            assert getattr(ferry, way)(array, look) == (array.dtype, shape, array.tobytes()), (shape, layout)


def test_l9_the_table_is_what_torch_has() -> None:
    dense = {
        str(kind).removeprefix("torch.")
        for kind in vars(torch).values()
        if isinstance(kind, torch.dtype) and not str(kind).startswith(("torch.q", "torch.bits"))
    }
    below_a_byte = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    assert dense - below_a_byte == set(DTYPES)
    for name, itemsize in DTYPES.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == itemsize


def test_a_conjugate_or_negated_view_arrives_as_its_values(ferry: Ferry) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert tensor.is_conj()
    assert ferry.through_pool(tensor, lambda view: view.torch().tolist()) == [1 - 2j, 3 + 4j]
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    assert ferry.inline(negated, lambda view: view.torch().tolist()) == [-2.0]


def test_a_tensor_that_wants_gradients_is_ferried_as_its_values(ferry: Ferry) -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert ferry.through_pool(tensor, lambda view: view.torch().tolist()) == [1.0, 1.0, 1.0]


def refused_tensors() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    yield "sparse coo", "sparse_coo", lambda: torch.eye(3).to_sparse()
    yield "sparse csr", "sparse_csr", lambda: torch.eye(3).to_sparse_csr()
    yield "quantised", "qint8", lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    yield "meta", "meta", lambda: torch.empty(3, device="meta")
    yield "nested", "nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    yield "bits", "bits8", lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8)
    yield "sub-byte", "uint4", lambda: torch.ones(3, dtype=torch.uint8).view(vars(torch)["uint4"])
    yield "big-endian", ">f4", lambda: np.ones(3, ">f4")
    yield "object", "object|O", lambda: np.array([{}], dtype=object)
    yield "structured", "V", lambda: np.zeros(3, [("a", "f4")])
    yield "text", "U", lambda: np.array(["a"])
    yield "datetime", "M8", lambda: np.zeros(3, "datetime64[s]")
    yield "long double", "f16|longdouble", lambda: np.zeros(3, np.longdouble)
    yield "a list", "list", lambda: [1, 2]
    yield "bytes", "bytes", lambda: b"12"
    yield "nothing", "NoneType", lambda: None


@pytest.mark.parametrize(
    ("name", "make"), [pytest.param(name, make, id=what) for what, name, make in refused_tensors()]
)
def test_l9_anything_else_is_refused_by_name(ferry: Ferry, name: str, make: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of beta features and deprecated ones
        tensor = make()
    drafts = ferry.publisher.drafts.total()
    with pytest.raises(UnsupportedDtype, match=name), ferry.publisher.publish(tensor):
        raise AssertionError("a draft was made")
    assert ferry.publisher.drafts.total() == drafts


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        ("float128", (1,), UnsupportedDtype),
        ("", (1,), UnsupportedDtype),
        ("torch.float32", (1,), UnsupportedDtype),
        ("qint8", (1,), UnsupportedDtype),
        ("uint8", (-1,), BadTensor),
        ("uint8", (-1, -1), BadTensor),
        ("uint8", (1 << 20, 1 << 20, 2), BadTensor),
        ("uint8", (1 << 32, 1 << 32), BadTensor),  # 2^64: 0 in 64 bits
        ("float64", (1 << 61,), BadTensor),  # 2^64 bytes
        ("uint8", (0, 1 << 39, 1 << 39), BadTensor),  # empty, and yet numpy and torch refuse to lay it out
        ("uint8", (1,) * 9, BadTensor),
    ],
)
def test_b31_an_impossible_header_is_refused(dtype: str, shape: tuple[int, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        nbytes_of(dtype, shape)
    with pytest.raises(error):
        View(np.empty(0, np.uint8), dtype, shape)
    with pytest.raises(error):
        View.empty(dtype, shape)


def test_the_largest_tensor_is_accepted_and_one_more_byte_is_not() -> None:
    assert nbytes_of("uint8", (MAX_NBYTES,)) == MAX_NBYTES
    with pytest.raises(BadTensor):
        nbytes_of("uint8", (MAX_NBYTES + 1,))


def test_a_view_has_exactly_the_bytes_its_shape_needs() -> None:
    with pytest.raises(BadTensor, match="needs 12 bytes, not 11"):
        View(np.empty(11, np.uint8), "float32", (3,))


def test_a_view_refuses_what_numpy_does_not_know() -> None:
    view = view_of(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedDtype, match="bfloat16"):
        view.numpy()
    assert view.torch().tolist() == [1.0, 1.0, 1.0]


def test_views_copy_only_between_equals() -> None:
    place = View.empty("float32", (2, 3))
    place.copy_from(view_of(np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert place.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    for other in (np.zeros((3, 2), np.float32), np.zeros((2, 3), np.int32)):
        with pytest.raises(BadTensor, match="cannot copy"):
            place.copy_from(view_of(other))
    copy = place.copy()
    place.data[:] = 0
    assert copy.numpy().sum() == 15


def test_b13_a_view_of_a_large_tensor_carries_only_its_own_bytes() -> None:
    batch = torch.zeros(1000, 100)
    with ExitStack() as block:
        draft = block.enter_context(Publisher(None).publish(batch[7]))
        sending: list[Buffer] = []
        draft.dispatch(None, sending)
        assert [memoryview(frame).nbytes for frame in sending] == [400]


def test_contiguous_tensors_are_viewed_and_not_copied() -> None:
    array, tensor = np.zeros((3, 4)), torch.zeros(3, 4)
    assert np.shares_memory(view_of(array).data, array)
    assert view_of(tensor).data.ctypes.data == tensor.data_ptr()
