"""What Driver makes of the objects that cuda-bindings returns; the driver itself is a fake, as there is no GPU here."""

from __future__ import annotations

import ctypes

from tensorferry.codecs.memory.cuda_driver import IPC_HANDLE_NBYTES, Driver

HANDLE = bytes(range(IPC_HANDLE_NBYTES))
freed: list[bool] = []


class OwnedHandle:
    """As a CUipcMemHandle: its bytes are other data as soon as it is collected."""

    memory = ctypes.create_string_buffer(HANDLE, IPC_HANDLE_NBYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)

    def __del__(self) -> None:
        ctypes.memset(self.memory, 0, IPC_HANDLE_NBYTES)
        freed.append(True)


class Bindings:
    """Of cuda-bindings' functions the one that is asked for, without a GPU."""

    @staticmethod
    def cuIpcGetMemHandle(pointer: int) -> tuple[int, OwnedHandle]:
        assert pointer == 4096
        return 0, OwnedHandle()


def test_an_ipc_handle_is_copied_before_its_owner_is_collected() -> None:
    assert Driver(Bindings()).ipc_export(4096) == HANDLE
    assert freed
