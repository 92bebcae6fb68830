"""An encoder output from one vLLM engine to another: tensorferry's connector beside vLLM's own example, which writes
and reads a shared folder. From `save_caches` in the producer until `start_load_caches` has returned in the consumer.

Needs vLLM, so it runs in the environment of `make test-vllm`: `.venv-vllm/bin/python -m benchmarks.vllm_ec`. The
connectors are the real ones, made as vLLM makes them and called in its order, in one process of a producer and one of a
consumer (whose core and worker share a thread, as in vLLM's uniproc executor); no model runs. Contenders take turns,
A B C A B C, and medians of all rounds are compared.

The example's consumer starts to read when it is told, by a byte in a pipe, that the file is whole: asked by
`has_cache_item` alone, it would read half of one. Ours finds out by itself, as an engine does that has deferred a
request: by asking `ensure_cache_available` again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

WIDTH = 4096  #: bfloat16
FLOOR = 0.3
DEADLINE_S = 120.0
OURS, DISK, MEMORY = "tensorferry, shm", "vLLM's example, a folder on disk", "vLLM's example, a folder in memory"


def config(contender: str, folder: str, role: str) -> Any:
    """As much of vLLM's configuration as the connectors read."""
    import torch
    from vllm.config import ECTransferConfig

    if contender == OURS:
        transfer = ECTransferConfig(
            ec_connector="TensorferryConnector",
            ec_connector_module_path="tensorferry.vllm_ec",
            ec_role=role,
            engine_id="bench",
            ec_connector_extra_config={"folder": f"{folder}/ec", "scan_s": 0.1},
        )
    else:
        transfer = ECTransferConfig(
            ec_connector="ECExampleConnector",
            ec_role=role,
            ec_connector_extra_config={"shared_storage_path": folder},
        )
    return SimpleNamespace(
        ec_transfer_config=transfer,
        parallel_config=SimpleNamespace(world_size=1, pipeline_parallel_size=1, rank=0, data_parallel_index=0),
        model_config=SimpleNamespace(
            model="bench",
            dtype=torch.bfloat16,
            hf_config=SimpleNamespace(to_dict=lambda: {}),
            get_hidden_size=lambda: WIDTH,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def connector(contender: str, folder: str, ec_role: str, role: str) -> Any:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    return ECConnectorFactory.create_connector(config(contender, folder, ec_role), ECConnectorRole[role])


def produce(contender: str, folder: str, rows: int, times: int, ready: Callable[[], None]) -> None:
    """Put an output for each line that comes; prints when each began and how long the call took, in seconds."""
    import torch

    worker = connector(contender, folder, "ec_producer", "WORKER")
    cache: dict[str, Any] = {}
    ready()
    for number in range(times):
        cache = {f"x{number}": torch.randn(rows, WIDTH).to(torch.bfloat16)}
        sys.stdin.readline()
        began = time.perf_counter()
        worker.save_caches(encoder_cache=cache, mm_hash=f"x{number}")
        print(began, time.perf_counter() - began, flush=True)
    sys.stdin.readline()
    worker.shutdown()


def consume(contender: str, folder: str, rows: int, times: int, ready: Callable[[], None]) -> None:
    """Load each output; prints when it was there, and when it had been copied once, as an engine does with its rows."""
    import torch

    core = connector(contender, folder, "ec_consumer", "SCHEDULER")
    worker = connector(contender, folder, "ec_consumer", "WORKER")
    if contender == OURS:
        until = time.monotonic() + DEADLINE_S
        while not worker._consumer.statistics().producers:
            assert time.monotonic() < until
            time.sleep(0.01)  # the meeting is in another thread, and tells nobody; it is not measured
    ready()
    inputs = torch.zeros(rows, WIDTH, dtype=torch.bfloat16)
    position = SimpleNamespace(offset=0, length=rows, get_num_embeds=lambda: rows)
    for number in range(times):
        feature = SimpleNamespace(identifier=f"x{number}", mm_position=position, data=None, modality="image")
        request = SimpleNamespace(
            request_id=f"r{number}", mm_features=[feature], get_num_encoder_embeds=lambda index: rows
        )
        core.ensure_cache_available(request, 0)
        print("waits", flush=True)
        if contender != OURS:
            sys.stdin.readline()  # the file is whole
        while not (core.ensure_cache_available(request, 0) and core.has_cache_item(f"x{number}")):
            pass  # as an engine's loop does
        core.update_state_after_alloc(request, 0)
        cache: dict[str, Any] = {}
        worker.bind_connector_metadata(
            core.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=[]))
        )
        worker.start_load_caches(cache)
        loaded = time.perf_counter()
        inputs.copy_(cache[f"x{number}"])
        print(loaded, time.perf_counter(), flush=True)
        core.request_finished(request)
    for part in (worker, core):
        part.shutdown()


class Side:
    """A process of one side."""

    def __init__(self, side: str, contender: str, folder: str, rows: int, times: int) -> None:
        command = [sys.executable, "-m", "benchmarks.vllm_ec", "--side", side, "--contender", contender]
        command += ["--folder", folder, "--rows", str(rows), "--times", str(times)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a side has ended"
        return line.strip()

    def say(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate(timeout=DEADLINE_S)


@contextlib.contextmanager
def place_of(contender: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tf-", dir="/dev/shm" if contender == MEMORY else None) as folder:  # noqa: S108
        yield folder


def one_round(contender: str, rows: int, times: int) -> list[tuple[float, float, float]]:
    """For each output but the first ones, in milliseconds from the put: it has returned, is loaded, was copied once."""
    found = []
    with place_of(contender) as folder:
        sides = [Side(side, contender, folder, rows, times) for side in ("producer", "consumer")]
        producer, consumer = sides
        for side in sides:
            while side.hear() != "READY":
                pass
        for _ in range(times):
            while consumer.hear() != "waits":
                pass
            producer.say()
            began, took = map(float, producer.hear().split())
            if contender != OURS:
                consumer.say()
            loaded, read = map(float, consumer.hear().split())
            found.append((1000 * took, 1000 * (loaded - began), 1000 * (read - began)))
        producer.say()
        for side in sides:
            side.close()
    return found[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=("producer", "consumer"))
    parser.add_argument("--contender", default=OURS)
    parser.add_argument("--folder", default="")
    parser.add_argument("--rows", type=int, default=1024, help="of 8 KiB")
    parser.add_argument("--times", type=int, default=43, help="outputs a round; the first three are not counted")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    if given.side:
        run = {"producer": produce, "consumer": consume}[given.side]
        run(given.contender, given.folder, given.rows, given.times, lambda: print("READY", flush=True))
        return
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(given.rounds):
        for contender in (OURS, DISK, MEMORY):
            found.setdefault(contender, []).extend(one_round(contender, given.rows, given.times))
    nbytes, samples = given.rows * WIDTH * 2, len(found[OURS])
    print(f"{nbytes / (1 << 20):g} MiB, milliseconds from the put, medians of {samples}:")
    print(f"{'':36} {'put':>7} {'loaded':>7} {'copied':>7}")
    medians = {who: [statistics.median(column) for column in zip(*rows, strict=True)] for who, rows in found.items()}
    for contender, (put, loaded, read) in medians.items():
        print(f"{contender:36} {put:7.2f} {loaded:7.2f} {read:7.2f}")
    ratio = medians[OURS][1] / medians[DISK][1]
    print(f"ours, loaded, beside {DISK}: {ratio:.2f} (<= {FLOOR})")
    sys.exit(ratio > FLOOR)


if __name__ == "__main__":
    main()
