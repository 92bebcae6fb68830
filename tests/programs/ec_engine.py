"""Parts of an engine that loads `tensorferry.vllm_ec`, with a fake of vLLM's interface in place of vLLM.

`ec_engine.py DESCRIPTOR`: commands as in `peer.py`. One process is an engine's core (`connect` with role SCHEDULER) or
one of its workers (WORKER). `schedule` and `run` call the connector in the order in which vLLM's scheduler and model
runner do. Source: vllm/v1/core/sched/scheduler.py and vllm/v1/worker/ec_connector_model_runner_mixin.py of 0.32.0.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "fake_vllm"))

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from tensorferry.connectors.vllm.connector import Step
from tensorferry.vllm_ec import TensorferryConnector


def tensor_of(seed: int, rows: int, width: int, dtype: str = "float32") -> torch.Tensor:
    made = torch.randn((rows, width), generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, dtype))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def features(items: list[Any]) -> list[SimpleNamespace]:
    """Of (name, rows, data) each, behind each other in the prompt with one token between."""
    made, offset = [], 1
    for name, rows, data in items:
        position = SimpleNamespace(offset=offset, length=rows, get_num_embeds=lambda rows=rows: rows)
        made.append(SimpleNamespace(identifier=name, mm_position=position, data=data, modality="image"))
        offset += rows + 1
    return made


@dataclass
class Request:
    request_id: str
    mm_features: list[SimpleNamespace]
    scheduled: bool = False
    free: set[int] = field(default_factory=set)


def start_collector_of_sent_frames() -> None:
    """pyzmq's own thread, which lives on once a frame was sent without a copy."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://warm")
        other.connect("inproc://warm")
        one.send(bytes(1 << 20), copy=False)
        other.recv()


def belongings() -> tuple[int, int, int]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:"), threading.active_count()


class Commands:
    """One method a command."""

    def __init__(self) -> None:
        start_collector_of_sent_frames()
        self._at_first = belongings()
        self.connector: Any = None
        self.cache: dict[str, torch.Tensor] = {}  # a worker's
        self.requests: dict[str, Request] = {}  # a core's
        self.cached: set[str] = set()  # what a core believes to be in the caches of its workers

    def connect(
        self, role: str, ec_role: str, extra: dict[str, Any], rank: int = 0, ranks: int = 1, **model: Any
    ) -> None:
        config = model.get("config", {"layers": 2})
        self.connector = TensorferryConnector(
            SimpleNamespace(
                ec_transfer_config=SimpleNamespace(
                    ec_role=ec_role, ec_connector_extra_config=extra, engine_id=model.get("engine", "engine")
                ),
                parallel_config=SimpleNamespace(
                    world_size=ranks, pipeline_parallel_size=1, rank=rank, data_parallel_index=0
                ),
                model_config=SimpleNamespace(
                    model=model.get("name", "tiny"),
                    dtype=getattr(torch, model.get("dtype", "float32")),
                    hf_config=SimpleNamespace(to_dict=lambda: config),
                    get_hidden_size=lambda: model.get("width", 8),
                ),
                device_config=SimpleNamespace(device_type="cpu"),
            ),
            ECConnectorRole[role],
        )

    def connect_with(self, role: str, ec_role: str, extra: dict[str, Any], more: dict[str, Any]) -> None:
        self.connect(role, ec_role, extra, **more)

    # --- a worker

    def encode(self, name: str, seed: int, rows: int, width: int = 8, dtype: str = "float32") -> str:
        """The tower has made an output."""
        self.cache[name] = tensor_of(seed, rows, width, dtype)
        self.connector.save_caches(encoder_cache=self.cache, mm_hash=name)
        return digest(self.cache[name])

    def run(self, step: dict[str, Any]) -> dict[str, str]:
        """One step; the digests of what was loaded."""
        self.connector.bind_connector_metadata(msgspec.convert(step, Step))
        if self.connector.is_producer:
            self.connector.start_save_caches(encoder_cache=self.cache)
        if self.connector.is_consumer:
            self.connector.start_load_caches(self.cache)
        self.connector.clear_connector_metadata()
        return {name: digest(self.cache[name]) for name in step["loads"]}

    def evict(self, name: str) -> None:
        self.cache.pop(name, None)
        self.cached.discard(name)

    def statistics(self) -> dict[str, Any]:
        part = self.connector._producer or self.connector._consumer
        found: dict[str, Any] = msgspec.to_builtins(part.statistics())
        return found

    # --- the core

    def admit(self, request: str, items: list[Any]) -> None:
        self.requests[request] = Request(request, features(items))

    def schedule(self) -> dict[str, Any]:
        """One step of the scheduler: what the workers are told, who was scheduled, and who failed.

        `encodes`: what it would have the tower encode. A request that came without its image ends a real engine there.
        """
        scheduled, encodes = [], []
        for request in self.requests.values():
            if request.scheduled or not self.connector.ensure_cache_available(request, 0):
                continue
            for index, feature in enumerate(request.mm_features):
                if feature.identifier in self.cached:
                    continue
                if not self.connector.has_cache_item(feature.identifier):
                    encodes.append(feature.identifier)
                self.cached.add(feature.identifier)
                self.connector.update_state_after_alloc(request, index)
            request.scheduled = True
            scheduled.append(request.request_id)
        output = SimpleNamespace(
            total_num_scheduled_tokens=len(scheduled),
            scheduled_new_reqs=[self.requests[name] for name in scheduled],
        )
        step = self.connector.build_connector_meta(output)
        failed = sorted(self.connector.take_unavailable_requests())
        for name in failed:
            self.finish(name)
        return {"step": step, "scheduled": scheduled, "encodes": encodes, "failed": failed}

    def computed(self, request: str, index: int) -> None:
        """The language model is past an item."""
        self.connector.update_state_after_free(self.requests[request], index)

    def finish(self, request: str) -> Any:
        return self.connector.request_finished(self.requests.pop(request))[1]

    def flush(self) -> Any:
        """A step of some other request, with which the workers hear what is to be let go of."""
        output = SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=[])
        return self.connector.build_connector_meta(output)

    def claims(self) -> int:
        claims: int = self.connector._board.claims
        return claims

    def reset(self) -> None:
        """Shut the connector down. Raises if anything of it is left."""
        if self.connector is not None:
            self.connector.shutdown()
        self.connector, self.cache, self.requests, self.cached = None, {}, {}, set()
        gc.collect()
        if (left := belongings()) != self._at_first:
            raise AssertionError(f"descriptors, memfds and threads: {left}, at first {self._at_first}")


def main() -> None:
    commands = Commands()
    with socket.socket(fileno=int(sys.argv[1])) as caller:
        while data := caller.recv(1 << 20):
            name, arguments = msgspec.msgpack.decode(data)
            answer: tuple[str, Any]
            try:
                answer = "ok", getattr(commands, name)(*arguments)
            except Exception as problem:
                answer = type(problem).__name__, str(problem)
            caller.send(msgspec.msgpack.encode(answer))
    commands.reset()


os.environ.setdefault("OMP_NUM_THREADS", "1")
main()
