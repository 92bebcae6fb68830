"""The incumbent's pools, CUDA IPC and VMM, beside ours: `python -m benchmarks.gpu_handoff --peer DIR`.

DIR is where the wheel of sglang 0.5.23 was unpacked, outside this repository. Its transports are imported as they are,
behind stubs of what they import of the rest. Its proxies travel pickled, as they do in its own messages, and, for a
comparison of the pools alone, as bare numbers ("unpickled"). Its pool does not tell when a read is done, so a window
counts the copies that its consumer's host has queued.
"""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - what the rival's messages are made of
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import msgspec

MIB = 1 << 20
RECYCLE_S = 0.05  #: their default, SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC
LOOK_S = 0.0001
PICKLED, WAIT = b"P", b"w"  #: how a packet begins; a msgpack array of six does not begin so
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def transport(folder: str) -> tuple[Any, Any]:
    """Their modules for CUDA IPC and for VMM, with their settings at their defaults."""
    sys.path.insert(0, folder)

    class Setting:
        def __init__(self, value: float) -> None:
            self._value = value

        def get(self) -> float:
            return self._value

    def stub(name: str, **contents: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(contents, __path__=[os.path.join(folder, *name.split("."))])
        sys.modules[name] = module

    stub("sglang")
    stub("sglang.srt")
    stub("sglang.srt.utils", log_info_on_rank0=lambda logger, text: logger.info(text))
    stub("sglang.srt.multimodal")
    stub(
        "sglang.srt.environ",
        envs=SimpleNamespace(
            SGLANG_MM_FEATURE_CACHE_MB=Setting(1024), SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC=Setting(RECYCLE_S)
        ),
    )
    parallel = SimpleNamespace(attn_dp_enabled=False, tp_size=1, num_dp_ranks=1, tp_rank=0, nnodes=1)
    context = dict.fromkeys(("get_parallel", "get_mm", "get_serving"), lambda: parallel)
    stub("sglang.srt.runtime_context", **context)
    stub("sglang.srt.managers")
    names = (
        "Modality",
        "MultimodalDataItem",
        "MultimodalProcessorOutput",
    )  # of their requests, which have no part here
    stub("sglang.srt.managers.schedule_batch", **dict.fromkeys(names))
    ipc = import_module("sglang.srt.multimodal.transport.cuda_ipc")
    sys.modules["sglang.srt.utils.cuda_ipc_transport_utils"] = ipc  # its other name
    return ipc, import_module("sglang.srt.utils.cuda_vmm_transport_utils")


def receive(line: socket.socket) -> bytes:
    while True:
        try:
            return line.recv(8192, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue


def consume(line: socket.socket, folder: str) -> None:
    torch: Any = import_module("torch")
    theirs, _ = transport(folder)
    torch.cuda.init()
    handle = tuple(decode(receive(line)))  # of a VMM pool: none
    like = torch.empty(1, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()) as _, torch.no_grad():
        while packet := receive(line):
            if packet[:1] == PICKLED:
                wait = packet[1:2] == WAIT
                pickle.loads(packet[2:]).reconstruct_on_target_device(0)  # noqa: S301 - sent by our own parent, their way
                if wait:
                    torch.cuda.current_stream().synchronize()
                line.send(encode(time.monotonic_ns()))
                continue
            wait, nbytes, offset, ready, ack, generation = decode(packet)
            if not nbytes:
                torch.cuda.synchronize()
                line.send(b"done")
                continue
            if like.nbytes != nbytes:
                like = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            proxy = theirs.CudaIpcTensorTransportProxy(like, like, handle, offset, ready, ack, generation, 1, True)
            proxy.reconstruct_on_target_device(0)
            if wait:
                torch.cuda.current_stream().synchronize()
            line.send(encode(time.monotonic_ns()))


class Bench:
    def __init__(self, torch: Any, pool: Any, line: socket.socket, is_ipc: bool) -> None:
        self.torch, self.pool, self.line, self.is_ipc = torch, pool, line, is_ipc
        self.pickled = True

    def publish(self, source: Any, wait: bool) -> None:
        proxy = self._wrap(source)
        if self.pickled:  # its own way of sending a proxy, which is part of what is measured
            self.line.send(PICKLED + (WAIT if wait else b"-") + pickle.dumps(proxy))
            return
        offset = proxy.proxy_state["ipc_extra"]["pool_byte_offset"]
        words = proxy.ready_byte_offset, proxy.ack_byte_offset, proxy.generation
        self.line.send(encode((wait, source.nbytes, offset, *words)))

    def _wrap(self, source: Any) -> Any:
        """Waits until there is room, which is to their advantage: theirs would go through the host. Sleeping, for what
        makes the room is a thread of this process."""
        if self.is_ipc:
            while (proxy := self.pool.wrap_tensor(source, use_pool_handle_cache=True)) is None:
                time.sleep(LOOK_S)  # see the docstring: a thread of this process makes the room
            return proxy
        while not any(chunk.size > source.nbytes + self.pool.control_size for chunk in self.pool.available_chunks):
            time.sleep(LOOK_S)  # as above
        return self.pool.wrap_tensor(source)

    def finish(self) -> None:
        self.line.send(encode((False, 0, 0, 0, 0, 0)))
        receive(self.line)

    def one_in_flight(self, source: Any, rounds: int) -> float:
        times: list[float] = []
        for number in range(rounds):
            self.torch.cuda.current_stream().synchronize()
            started = time.monotonic_ns()
            self.publish(source, True)
            ended: int = decode(receive(self.line))
            if number >= rounds // 10:
                times.append((ended - started) / 1e3)
        return statistics.median(times)

    def pipelined(self, source: Any, items: int, window: int) -> float:
        started, flying = time.monotonic(), 0
        for _ in range(items):
            if flying == window:
                receive(self.line)
                flying -= 1
            self.publish(source, False)
            flying += 1
        while flying:
            receive(self.line)
            flying -= 1
        self.finish()
        return items / (time.monotonic() - started)


@contextmanager
def bench(torch: Any, folder: str, kind: Literal["IPC", "VMM"]) -> Iterator[Bench]:
    ipc, vmm = transport(folder)
    is_ipc = kind == "IPC"
    if is_ipc:
        pool = ipc.MmItemMemoryPool(1024 * MIB, RECYCLE_S, 0, 1)
    else:
        pool = vmm.CudaVmmMemoryPool(1024 * MIB, RECYCLE_S, 0, 1, allow_posix_fallback=True)
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        command = [sys.executable, "-m", "benchmarks.gpu_rival", str(other.fileno()), folder]
        process = subprocess.Popen(command, pass_fds=[other.fileno()])
        other.close()
        try:
            ours.send(encode(pool._pool_ipc_handle if is_ipc else ()))
            with torch.cuda.stream(torch.cuda.Stream()):
                yield Bench(torch, pool, ours, is_ipc)
        finally:
            process.kill()
            process.wait()
            pool.shutdown()


def measure(torch: Any, folder: str, scale: float) -> dict[str, float]:
    found: dict[str, float] = {}
    small, large = (torch.ones(mib * MIB, dtype=torch.uint8, device="cuda") for mib in (8, 36))
    torch.cuda.synchronize()
    kinds: tuple[Literal["IPC"], Literal["VMM"]] = ("IPC", "VMM")
    for kind in kinds:
        with bench(torch, folder, kind) as it:
            name = f"incumbent {kind}"
            it.one_in_flight(small, 50)
            it.pipelined(small, 100, 8)
            found[f"{name}, 8 MiB one in flight, us"] = it.one_in_flight(small, int(1000 * scale))
            found[f"{name}, 8 MiB pipelined window 8, items/s"] = it.pipelined(small, int(5000 * scale), 8)
            found[f"{name}, 36 MiB pipelined pool 1 GiB, items/s"] = it.pipelined(large, int(1000 * scale), 28)
            if kind == "IPC":
                it.pickled = False
                it.one_in_flight(small, 50)
                found[f"{name} unpickled, 8 MiB one in flight, us"] = it.one_in_flight(small, int(1000 * scale))
    return found


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as line:
        consume(line, sys.argv[2])
