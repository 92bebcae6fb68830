"""A CudaDevice over the stub driver, without torch or streams: views are numpy arrays, and work is done at once.

Words can be held up, as a stream would that has much to do before them: nothing is stored between `hold` and `let_go`.
"""

from __future__ import annotations

import ctypes
from uuid import UUID

import numpy as np


class StubDevice:
    held = None  #: stores that have to wait, of all devices of this process; None: none has to

    def __init__(self, driver, ordinal):
        self._driver, self.ordinal = driver, ordinal
        self.uuid = driver.uuid(ordinal)
        driver.call("cuDevicePrimaryCtxRetain", ordinal)

    @classmethod
    def of(cls, driver, uuid, local):
        if local is None:
            local = [driver.uuid(ordinal) for ordinal in range(driver.device_count())].index(UUID(bytes=uuid))
        return cls(driver, local)

    def close(self):
        self._driver.call("cuDevicePrimaryCtxRelease", self.ordinal)

    def call(self, method, *arguments, **options):
        return getattr(self._driver, method)(*arguments, **options)

    def current_stream(self):
        return 0

    def order(self):
        return StubOrder(self)

    def over(self, pointer, nbytes):
        """The first byte is looked at, as torch has the driver do."""
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(pointer)))
        whole[:1].tobytes()
        return whole

    def empty(self, nbytes, stream):
        return np.empty(nbytes, np.uint8)

    @classmethod
    def hold(cls):
        cls.held = []

    @classmethod
    def let_go(cls):
        held, cls.held = cls.held, None
        for store in held:
            store()


class StubOrder:
    stream = 0

    def __init__(self, device):
        self._device = device

    def check(self):
        pass

    def store(self, page, column, slot, generation):
        def write():
            self._device.call("write_word", 0, page.device_word(column, slot), generation)

        if StubDevice.held is None:
            write()
        else:
            StubDevice.held.append(write)

    def join(self):
        pass

    def mark(self):
        return 0

    def after(self, mark):
        pass


def install():
    """Let this process's elastic pools lie on such devices."""
    from tensorferry.codecs.memory import cuda_vmm

    cuda_vmm.CudaDevice = StubDevice
