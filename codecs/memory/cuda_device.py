"""One GPU as this process uses it: the primary context, which is torch's too, and torch's streams as orders.

Imports torch when a device is opened. Every driver call is made with the device's context current, whatever device
the calling thread has set, and leaves that setting as it was.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import StreamCapturing
from tensorferry.codecs.memory.cuda_driver import CudaError, Driver, NoDriver
from tensorferry.codecs.memory.memory import Arrival, Bytes, WordPage
from tensorferry.codecs.memory.pinned import pinned


class CudaDevice:
    """Holds a reference to the primary context, until `close`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """ordinal: among the devices that this process sees, counted as torch does. Raises NoDriver, CudaError."""
        import torch

        self._torch: Any = torch
        self._driver = driver
        try:
            self._torch.cuda.init()
        except (AssertionError, RuntimeError) as problem:  # torch's: it is built without CUDA, or for another driver
            raise NoDriver(f"torch {torch.__version__} cannot use CUDA: {problem}") from None
        self.ordinal = ordinal
        self.uuid = driver.uuid(ordinal)
        self._context = driver.call("cuDevicePrimaryCtxRetain", ordinal)
        self._context_number = int(self._context)
        # What torch.cuda's functions call, without the objects they make of it: these run for every hand-over. The
        # code that torch generates calls them too.
        self._current_device = self._torch._C._cuda_getDevice
        self._current_stream = self._torch._C._cuda_getCurrentRawStream
        self._current_is_capturing = self._torch._C._cuda_isCurrentStreamCapturing

    @classmethod
    def of(cls, driver: Driver, uuid: bytes, local: int | None) -> CudaDevice:
        """The device to reach a pool on GPU `uuid` from: that one if this process sees it, or else `local`.

        local: an ordinal, or None for the thread's current device; a number is taken even when the GPU is seen.
        """
        import torch

        if local is None:
            seen = [driver.uuid(ordinal) for ordinal in range(driver.device_count())]
            local = seen.index(UUID(bytes=uuid)) if UUID(bytes=uuid) in seen else torch.cuda.current_device()
        return cls(driver, local)

    def close(self) -> None:
        self._driver.call("cuDevicePrimaryCtxRelease", self.ordinal)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the driver with this device's context current."""
        do, driver = getattr(self._driver, method), self._driver
        if int(driver.call("cuCtxGetCurrent")) == self._context_number:  # so it is wherever torch was used
            return do(*arguments, **options)
        driver.call("cuCtxPushCurrent", self._context)
        try:
            return do(*arguments, **options)
        finally:
            driver.call("cuCtxPopCurrent")

    def current_stream(self) -> int:
        """The current stream of this thread; 0 is the default one."""
        return int(self._current_stream(self.ordinal))

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream records a CUDA graph."""
        if self._current_device() == self.ordinal and self._current_stream(self.ordinal) == stream:
            return bool(self._current_is_capturing())  # a tenth of what asking the driver takes
        try:
            return bool(self.call("is_capturing", stream))
        except CudaError as problem:
            if problem.name != "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT":  # the default stream, beside one that captures
                raise
            return True

    def order(self) -> StreamOrder:
        """The order of this thread's current stream. Raises StreamCapturing."""
        stream = self.current_stream()
        if self.is_capturing(stream):
            raise StreamCapturing(stream)
        return StreamOrder(self, stream)

    def over(self, pointer: int, nbytes: int) -> Bytes:
        """Memory of this device that torch does not own, as a tensor of torch."""
        return self._torch.as_tensor(_Span(pointer, nbytes), device=f"cuda:{self.ordinal}")

    def using(self, stream: int) -> AbstractContextManager[None]:
        """Let this thread's torch operations on this device go into a stream."""
        context: AbstractContextManager[None] = self._torch.cuda.stream(self.external(stream))
        return context

    def external(self, stream: int) -> Any:
        """A stream as torch has it. For 0, the default stream, torch.cuda.ExternalStream would make a new one."""
        cuda = self._torch.cuda
        return cuda.ExternalStream(stream, device=self.ordinal) if stream else cuda.default_stream(self.ordinal)

    def event(self, stream: int) -> Any:
        """An event of torch at the end of the work that is queued in a stream."""
        event = self._torch.cuda.Event()
        event.record(self.external(stream))
        return event

    def empty(self, nbytes: int, stream: int) -> Bytes:
        """Memory of torch, for use in a stream."""
        with self.using(stream):
            return self._torch.empty(nbytes, dtype=self._torch.uint8, device=f"cuda:{self.ordinal}")


class StreamOrder:
    """The order of one stream. See `memory.Order`."""

    __slots__ = ("_device", "stream")

    def __init__(self, device: CudaDevice, stream: int) -> None:
        self._device, self.stream = device, stream

    def check(self) -> None:
        if self._device.is_capturing(self.stream):
            raise StreamCapturing(self.stream)

    def store(self, page: WordPage, column: int, slot: int, generation: int) -> None:
        device = self._device
        if device.is_capturing(self.stream):
            raise StreamCapturing(self.stream)
        if not device.call("write_word_if_busy", self.stream, page.device_word(column, slot), generation):
            page.store(column, slot, generation)  # nothing to come after: the GPU is spared the trip

    def join(self) -> None:
        current = self._device.current_stream()
        if current != self.stream:
            self.after(StreamOrder(self._device, current).mark())

    def mark(self) -> int:
        event: int = self._device.call("event")
        self._device.call("record", event, self.stream)
        return event

    def after(self, mark: int) -> None:
        self._device.call("wait_event", self.stream, mark)
        self._device.call("forget", mark)

    def to_host(self, data: Bytes) -> Arrival:
        return _ToHost(self._device, data, self.stream)


class _ToHost:
    """Bytes on their way into page-locked host memory."""

    def __init__(self, device: CudaDevice, data: Bytes, stream: int) -> None:
        with device.call("beside_captures"):
            here = pinned(data.nbytes)
        with device.using(stream):
            here.copy_(data, non_blocking=True)
        self._device, self._copied = device, device.event(stream)
        self.data: npt.NDArray[np.uint8] = here.numpy()

    @property
    def done(self) -> bool:
        return bool(self._device.call("happened", self._copied.cuda_event))


class _Span:
    """An address range as torch sees it. Source: the CUDA array interface, version 3."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
        }
