"""What others do to hand a tensor to another process, written here so that both run on one machine at one time.

The ZeroMQ ones use plain sockets, and their consumer is a coroutine of the same event loop as ours, woken by the
descriptor: cheaper than zmq.asyncio, which most services use, and which one variant shows. So they are compared by
how they carry bytes. A rival is safe when the source may be overwritten at once, which is what our publisher
promises; the unsafe variants leave that to the caller, and are only reported.
"""

from __future__ import annotations

import pickle  # noqa: TID251  # a rival's way: only to read what this benchmark's own producer wrote
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from benchmarks.sides import Answer, Bytes, Send, Setup, bytes_of
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.channels.readable_fd import readable


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Of a message without a pool: enough to make a tensor of the frame that follows."""

    number: int
    dtype: str
    shape: tuple[int, ...]
    request: bytes


class _OverZmq(ABC):
    """A message is some frames; the subclasses say which."""

    safe = True
    environment: Mapping[str, str] = {}

    def made(self, setup: Setup) -> Any:
        """The tensor that the producer writes into."""
        return setup.source()

    @abstractmethod
    def put(self, push: zmq.Socket[bytes], number: int, source: Any) -> None:
        """Send a message."""

    @abstractmethod
    def take(self, pull: zmq.Socket[bytes], flags: int) -> tuple[int, Bytes]:
        """Receive one; it is there, or may be waited for."""

    @contextmanager
    def sender(self, setup: Setup) -> Iterator[Send]:
        source = self.made(setup)
        data = bytes_of(np.asarray(source))
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.linger = 0
            push.connect(setup.address)

            def send(number: int) -> None:
                setup.write(data, number)
                self.put(push, number, source)

            yield send

    async def receive(self, setup: Setup, answer: Answer) -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as pull:
            pull.bind(setup.address)
            while True:
                while int(pull.get(zmq.EVENTS)) & zmq.POLLIN:
                    answer(*self.take(pull, zmq.NOBLOCK))
                await readable(pull.fileno())


class SendPyobjTorch(_OverZmq):
    """`send_pyobj` of a torch tensor: pickled in band."""

    def made(self, setup: Setup) -> Any:
        import torch

        return torch.from_numpy(setup.source())

    def put(self, push: zmq.Socket[bytes], number: int, source: Any) -> None:
        push.send_pyobj((number, source), zmq.NOBLOCK)

    def take(self, pull: zmq.Socket[bytes], flags: int) -> tuple[int, Bytes]:
        number, tensor = pull.recv_pyobj(flags)
        return number, bytes_of(np.asarray(tensor))


class SendPyobjNumpy(SendPyobjTorch):
    """The same of a numpy array, which pickles faster."""

    def made(self, setup: Setup) -> Any:
        return setup.source()


class Pickle5(_OverZmq):
    """Pickle protocol 5: the array's buffer travels out of band, as a frame of its own."""

    def put(self, push: zmq.Socket[bytes], number: int, source: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        # A rival's way: what is measured is pickling.
        header = pickle.dumps((number, source), protocol=5, buffer_callback=buffers.append)
        push.send_multipart([header, *(self.kept(buffer.raw()) for buffer in buffers)], zmq.NOBLOCK, copy=False)

    def kept(self, buffer: memoryview) -> Buffer:
        """A frame that stays as it is while the source changes."""
        return buffer.tobytes()

    def take(self, pull: zmq.Socket[bytes], flags: int) -> tuple[int, Bytes]:
        header, *buffers = (frame.buffer for frame in pull.recv_multipart(flags, copy=False))
        number, tensor = pickle.loads(header, buffers=buffers)  # noqa: S301 - its own producer's, beside it
        return number, bytes_of(tensor)


class Pickle5Unsafe(Pickle5):
    """The same, sent from where it lies."""

    safe = False

    def kept(self, buffer: memoryview) -> Buffer:
        return buffer


class MsgpackFrames(_OverZmq):
    """A msgpack header, then the tensor's bytes as a frame; no pool."""

    def put(self, push: zmq.Socket[bytes], number: int, source: Any) -> None:
        push.send_multipart(self.frames(number, source), zmq.NOBLOCK, copy=False)

    def frames(self, number: int, source: npt.NDArray[np.float32]) -> list[Buffer]:
        return [msgspec.msgpack.encode(Header(number, "float32", source.shape, bytes(16))), self.kept(source)]

    def kept(self, source: npt.NDArray[np.float32]) -> Buffer:
        """A frame that stays as it is while the source changes."""
        return source.tobytes()

    def take(self, pull: zmq.Socket[bytes], flags: int) -> tuple[int, Bytes]:
        return self.parsed(pull.recv_multipart(flags, copy=False))

    def parsed(self, frames: Sequence[zmq.Frame]) -> tuple[int, Bytes]:
        header, data = (frame.buffer for frame in frames)
        described = msgspec.msgpack.decode(header, type=Header)
        tensor = np.frombuffer(data, described.dtype).reshape(described.shape)
        return described.number, bytes_of(tensor)


class MsgpackFramesUnsafe(MsgpackFrames):
    """The same, sent from where it lies."""

    safe = False

    def kept(self, source: npt.NDArray[np.float32]) -> Buffer:
        return source


class MsgpackFramesAsyncio(MsgpackFrames):
    """The same through zmq.asyncio at both ends, as services do."""

    @contextmanager
    def sender(self, setup: Setup) -> Iterator[Send]:
        source = self.made(setup)
        data = bytes_of(source)
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as push:
            push.linger = 0
            push.connect(setup.address)

            def send(number: int) -> None:
                setup.write(data, number)
                push.send_multipart(self.frames(number, source), zmq.NOBLOCK, copy=False)

            yield send

    async def receive(self, setup: Setup, answer: Answer) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
            pull.bind(setup.address)
            while True:
                answer(*self.parsed(await pull.recv_multipart(copy=False)))


class MsgpackFramesBlocking(MsgpackFrames):
    """The same to a consumer that has no event loop: it blocks in ZeroMQ, and can do nothing else meanwhile."""

    async def receive(self, setup: Setup, answer: Answer) -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as pull:
            pull.bind(setup.address)
            while True:
                answer(*self.take(pull, 0))


class TorchQueue:
    """A torch.multiprocessing queue: the tensor is copied into shared memory of its own, its descriptor passed."""

    safe = True
    environment: Mapping[str, str] = {}

    @contextmanager
    def sender(self, setup: Setup) -> Iterator[Send]:
        import torch

        source = torch.from_numpy(setup.source())
        data = bytes_of(source.numpy())

        def send(number: int) -> None:
            setup.write(data, number)
            # How torch's own DataLoader makes one: a single copy. `source.clone().share_memory_()` makes two.
            storage = torch.UntypedStorage._new_shared(setup.nbytes)  # type: ignore[no-untyped-call]
            shared = torch.empty(0, dtype=source.dtype).set_(storage).view(source.shape).copy_(source)
            setup.queue.put((number, shared))

        yield send

    async def receive(self, setup: Setup, answer: Answer) -> None:
        while True:
            number, tensor = setup.queue.get()
            answer(number, bytes_of(tensor.numpy()))


class TorchQueueUnsafe(TorchQueue):
    """The same of one tensor that lies in shared memory from the start."""

    safe = False

    @contextmanager
    def sender(self, setup: Setup) -> Iterator[Send]:
        import torch

        source = torch.from_numpy(setup.source()).share_memory_()  # type: ignore[no-untyped-call]
        data = bytes_of(source.numpy())

        def send(number: int) -> None:
            setup.write(data, number)
            setup.queue.put((number, source))

        yield send
