"""What the driver answers to a question after a stream or an event while another thread captures a CUDA graph.

`python -m benchmarks.probes.capture`: one thread captures in the global mode, which is torch's too; another asks
whether its own idle stream is done, and an event that has happened, in its usual mode and in the relaxed one. Printed
for each: the answer, and what became of the capture.
"""

from __future__ import annotations

import threading

from tensorferry.codecs.memory.cuda_driver import CudaError, Driver

DEADLINE_S = 30.0


def answer(cuda: Driver, name: str, *arguments: object) -> str:
    try:
        cuda.call(name, *arguments)
    except CudaError as problem:
        return problem.name
    return "CUDA_SUCCESS"


def ask(cuda: Driver, query: str, asked: int, relaxed: bool) -> tuple[str, str]:
    """The query's answer, and that of ending the capture that goes on meanwhile."""
    modes = cuda._cuda.CUstreamCaptureMode
    began, asked_it = threading.Event(), threading.Event()
    ended: list[str] = []

    def capture() -> None:
        with cuda.context(0):
            stream = cuda.stream()
            cuda.call("cuStreamBeginCapture", stream, modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
            began.set()
            asked_it.wait(DEADLINE_S)
            ended.append(answer(cuda, "cuStreamEndCapture", stream))
            cuda.destroy(stream)

    thread = threading.Thread(target=capture)
    thread.start()
    began.wait(DEADLINE_S)
    try:
        if not relaxed:
            return answer(cuda, query, asked), _join(thread, asked_it, ended)
        mode = cuda.call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            return answer(cuda, query, asked), _join(thread, asked_it, ended)
        finally:
            cuda.call("cuThreadExchangeStreamCaptureMode", mode)
    finally:
        asked_it.set()


def _join(thread: threading.Thread, asked_it: threading.Event, ended: list[str]) -> str:
    asked_it.set()
    thread.join(DEADLINE_S)
    return ended[0]


def main() -> None:
    cuda = Driver.load()
    with cuda.context(0):
        stream, event = cuda.stream(), cuda.event()
        cuda.record(event, stream)
        cuda.synchronize(stream)
        print(f"{'asked':15} {'mode':8} {'answer':42} the capture")
        for query, asked in (("cuStreamQuery", stream), ("cuEventQuery", event)):
            for relaxed in (False, True):
                answered, ended = ask(cuda, query, asked, relaxed)
                print(f"{query:15} {'relaxed' if relaxed else 'usual':8} {answered:42} {ended}")


if __name__ == "__main__":
    main()
