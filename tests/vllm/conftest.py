"""Real vLLM engines and tiny checkpoints, each in a process of its own: vLLM changes torch's settings, and warns."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
from tests.vllm.engine import ENVIRONMENT

HERE = Path(__file__).parent
MISSING = "needs vLLM, which has an environment of its own: make test-vllm"
START_S, ANSWER_S, END_S = 300.0, 120.0, 60.0
PLACE, PROMPT, MAX_TOKENS = "<|vision_start|><|image_pad|><|vision_end|>", "What is this?", 24


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("vllm")
            item.add_marker("slow")
            if find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason=MISSING))


class Engine:
    """A process of `engine.py`, until the end of its block."""

    def __init__(self, checkpoint: Path, log: Path, arguments: dict[str, Any], *, one_process: bool) -> None:
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not one_process))}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), str(checkpoint), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self._log, self._ready = log, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """The outcomes of requests that run together."""
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests).encode() + b"\n")
        self._process.stdin.flush()
        outcomes: list[dict[str, Any]] = json.loads(self._line(ANSWER_S))
        return outcomes

    def wait(self) -> None:
        """Until it serves."""
        if not self._ready:
            assert self._line(START_S) == b"READY\n"
            self._ready = True

    def stop(self) -> int:
        """Let it end by itself; its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(END_S)

    def kill(self) -> None:
        """SIGKILL to all of its processes, as a supervisor does."""
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            pass
        self._process.wait(END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, deadline_s: float) -> bytes:
        output = self._process.stdout
        assert output is not None
        assert select.select([output], [], [], deadline_s)[0], f"nothing within {deadline_s} s"
        line = output.readline()
        assert line, f"the engine has ended:\n{self._log.read_text()[-4000:]}"
        return line


class Lab:
    """A checkpoint, what transformers makes of it, and engines that serve it."""

    def __init__(self, family: str, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack, self._engines = folder, stack, 0
        self.checkpoint = folder / family
        program = [sys.executable, str(HERE / "checkpoints.py"), family, str(self.checkpoint)]
        subprocess.run(program, check=True, capture_output=True, timeout=START_S, env={**os.environ, **ENVIRONMENT})
        self.answers = json.loads((self.checkpoint / "answers.json").read_text())
        self.images = [str(self.checkpoint / f"{number}.png") for number in range(2)]

    def engine(self, ec_role: str | None = None, *, one_process: bool = True, **settings: Any) -> Engine:
        """settings: of the connector, and `arguments`, of vLLM."""
        arguments = settings.pop("arguments", {})
        if ec_role is not None:
            arguments["ec_transfer_config"] = {
                "ec_connector": "TensorferryConnector",
                "ec_connector_module_path": "tensorferry.vllm_ec",
                "ec_role": ec_role,
                "ec_connector_extra_config": {"folder": str(self.folder / "ec"), "scan_s": 0.1, **settings},
            }
        self._engines += 1
        log = self.folder / f"{self._engines}-{ec_role}.log"
        return self._stack.enter_context(Engine(self.checkpoint, log, arguments, one_process=one_process))

    def items(self, *names: str, image: int | None = None) -> list[dict[str, Any]]:
        """The first images under these names, or the same image under all."""
        grids = self.answers["grids"]
        return [{"name": name, "grid": grids[number if image is None else image]} for number, name in enumerate(names)]

    def with_images(self, *names: str, image: int | None = None, max_tokens: int = 1) -> dict[str, Any]:
        paths = [self.images[number if image is None else image] for number in range(len(names))]
        request = {"prompt": PLACE * len(names) + PROMPT, "images": paths, "max_tokens": max_tokens}
        return request | {"items": self.items(*names, image=image)}

    def without(self, *names: str, image: int | None = None, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        request = {"prompt": PLACE * len(names) + PROMPT, "max_tokens": max_tokens}
        return request | {"items": self.items(*names, image=image)}


@pytest.fixture(scope="module")
def lab_of(may_start_processes: None) -> Iterator[Callable[[str], Lab]]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder, ExitStack() as stack:
        labs: dict[str, Lab] = {}

        def get(family: str) -> Lab:
            if family not in labs:
                place = Path(folder) / str(len(labs))
                place.mkdir()
                labs[family] = Lab(family, place, stack)
            return labs[family]

        yield get
