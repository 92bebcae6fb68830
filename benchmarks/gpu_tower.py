"""Qwen3-VL's vision tower, ours beside transformers': `python -m benchmarks.gpu_tower [--json FILE] [--only WORKLOAD]`.

On a machine with a GPU, with the `hf` extra. The tower is the one of Qwen3-VL-8B (27 layers, 1152 wide, bfloat16) with
seeded weights, the same for all contenders. They take turns, A B C, A B C; a pass is timed by the host's clock between
two waits for the GPU, and the first ones are not counted. `transformers` is called as its own models call it, with the
grids on the GPU. Differences are those from its embeddings. `--smoke` is a tiny tower in host memory, to see that
everything runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.results import Measurement, Outcome, Verdict, measurement, speedup
from benchmarks.tables import table
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.attention import Stretches
from tensorferry.stages.adapters.grid_tables import Grid
from tensorferry.stages.adapters.packed_forward import Packed, Packing
from tensorferry.stages.adapters.qwen3_vl import FAMILY
from tensorferry.stages.adapters.rotary import Angles
from tensorferry.stages.adapters.tower import Tower

THEIRS, TABLES = "transformers", "transformers, given our tables"
UNEQUAL, OURS, COMPILED = "ours, variable-length attention", "ours", "ours, compiled"
SIDES = np.random.default_rng(0).integers(4, 33, (32, 2)) * 2  #: patches a side, 8 to 64

WORKLOADS: Mapping[str, Sequence[Grid]] = {
    "16 of 64x64": ((1, 64, 64),) * 16,
    "16 of 32x32": ((1, 32, 32),) * 16,
    "64 of 16x16": ((1, 16, 16),) * 64,
    "32 sizes": tuple((1, int(height), int(width)) for height, width in SIDES),
}
SMALL = {"16 of 32x32": 1.5, "64 of 16x16": 3.0, "32 sizes": 2.0}
#: How many times transformers' images a second: (workload, contender, at least).
FLOORS = (
    ("16 of 64x64", UNEQUAL, 1.15),
    ("16 of 64x64", COMPILED, 1.3),
    *((name, contender, limit) for name, limit in SMALL.items() for contender in (OURS, COMPILED)),
)
Pass = Callable[[torch.Tensor, Sequence[Grid]], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int  #: turns that each contender has
    seconds: float  #: of a turn, at least; and at least two passes
    options: Mapping[str, str | int | float | bool]
    shrink: int  #: of every side


GPU = Size(rounds=4, seconds=0.5, options={"dtype": "bfloat16"}, shrink=1)
SMOKE = Size(rounds=1, seconds=0, options={"dtype": "float32", "tiny": True}, shrink=16)


def _unequal(layer: Any, hidden: torch.Tensor, angles: Angles, stretches: Stretches) -> torch.Tensor:
    """As if no two images were of one size."""
    return FAMILY.packing.block(layer, hidden, angles, stretches._replace(equal=0))


class Contenders:
    """Ways to run one tower; each answers with the embeddings."""

    def __init__(self, size: Size, device: torch.device) -> None:
        def tower(**options: bool) -> Tower:
            return Tower(FAMILY, ModelSpec(adapter="qwen3-vl", options=dict(size.options) | options), 2)

        began = time.monotonic()
        ours = tower()
        ours.warm_up(device.index)
        self.model = ours.model
        unequal = Packed(Packing(FAMILY.packing.run, _unequal), ours.model, compile=False)
        self.passes: dict[str, Pass] = {
            THEIRS: lambda features, grids: (
                self.model(features, grid_thw=torch.tensor(grids, device=device)).pooler_output
            ),
            TABLES: lambda features, grids: (
                self.model(features, grid_thw=torch.tensor(grids), **ours.batch(grids, device)).pooler_output
            ),
            UNEQUAL: lambda features, grids: unequal(features, ours.batch(grids, device))["embeddings"],
            OURS: lambda features, grids: ours.forward(features, grids)["embeddings"],
        }
        say(f"weights and kernels in {time.monotonic() - began:.1f} s")
        if device.type == "cuda":
            began = time.monotonic()
            compiled = tower(compile=True)  # weights of its own, the same by their seed
            compiled.warm_up(device.index)
            self.compiled = compiled
            self.passes[COMPILED] = lambda features, grids: compiled.forward(features, grids)["embeddings"]
            say(f"weights, and compiled, in {time.monotonic() - began:.1f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def flop(config: Any, grids: Sequence[Grid]) -> float:
    """Of one pass: twice the multiplications in its matrix products, attention's among them."""
    wide, inner = config.hidden_size, config.intermediate_size
    frames = [(height * width) for time, height, width in grids for _ in range(time)]
    patches, merged = sum(frames), sum(frames) // config.spatial_merge_size**2
    layer = patches * (4 * wide * wide + 2 * wide * inner) + sum(2 * frame * frame * wide for frame in frames)
    embed = patches * wide * config.in_channels * config.temporal_patch_size * config.patch_size**2
    corner = wide * config.spatial_merge_size**2
    mergers = (1 + len(config.deepstack_visual_indexes)) * merged * corner * (corner + config.out_hidden_size)
    return 2.0 * float(config.depth * layer + embed + mergers)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, act: Callable[[], object]) -> float:
    """Seconds, until the GPU has done it."""
    wait(device)
    began = time.perf_counter()
    act()
    wait(device)
    return time.perf_counter() - began


def matmul_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of a square matrix product, the median."""
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = [timed(device, lambda: [one @ other for _ in range(10)]) / 10 for _ in range(12)]
    return 2.0 * side**3 / statistics.median(times[2:])


def host_waits(act: Callable[[], object]) -> int:
    """How often the host waits for the GPU, by torch's own count; 0 without a GPU."""
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode(mode)
    return sum("synchroniz" in str(one.message) for one in found)


@torch.inference_mode()
def compare(name: str, grids: Sequence[Grid], contenders: Contenders, size: Size, matmul: float) -> Outcome:
    """All contenders on one workload."""
    parameter = next(contenders.model.parameters())
    device, config = parameter.device, contenders.model.config
    wide = config.in_channels * config.temporal_patch_size * config.patch_size**2
    features = torch.randn(sum(map(prod, grids)), wide, generator=torch.Generator().manual_seed(0))
    features = features.to(device, parameter.dtype)
    expected = contenders.passes[THEIRS](features, grids).float()
    times: dict[str, list[float]] = {name: [] for name in contenders.passes}
    details: dict[str, dict[str, float]] = {}
    for contender, forward in contenders.passes.items():
        found = forward(features, grids).float()
        difference = (found - expected).abs()
        details[contender] = {
            "max_difference": difference.max().item(),
            "rms_difference": (difference.square().mean().sqrt() / expected.square().mean().sqrt()).item(),
        }
        forward(features, grids)
        waits = host_waits(lambda forward=forward: forward(features, grids))  # type: ignore[misc]
        details[contender]["host_waits"] = waits
    for _ in range(size.rounds):
        for contender, forward in contenders.passes.items():
            forward(features, grids)  # finds the caches as another contender left them
            spent: list[float] = []
            while len(spent) < 2 or sum(spent) < size.seconds:
                spent.append(timed(device, lambda forward=forward: forward(features, grids)))  # type: ignore[misc]
            times[contender] += spent
    work = flop(config, grids)
    measured: list[Measurement] = []
    for contender, spent in times.items():
        rate = work / statistics.median(spent)
        details[contender] |= {"tflops": rate / 1e12, "matmul_percent": 100 * rate / matmul}
        rates = [len(grids) / one for one in spent]
        measured.append(measurement(contender, "images/s", rates, details=details[contender]))
    outcome = Outcome(name, f"{name} patches, {sum(map(prod, grids)):,} in all", tuple(measured))
    verdicts = [
        Verdict.of(f"{contender}, times {THEIRS}", speedup(outcome, contender, THEIRS), ">=", limit)
        for workload, contender, limit in FLOORS
        if workload == name
    ]
    return msgspec.structs.replace(outcome, verdicts=tuple(verdicts))


def run(size: Size, device: torch.device, only: Sequence[str]) -> list[Outcome]:
    contenders = Contenders(size, device)
    gpu = device.type == "cuda"
    matmul = matmul_rate(device, next(contenders.model.parameters()).dtype, 8192 if gpu else 64)
    print(f"\nbf16 matrix product of 8192: {matmul / 1e12:,.0f} TFLOP/s\n" if gpu else "\nnothing is measured here\n")
    outcomes = []
    for name, grids in WORKLOADS.items():
        if not only or name in only:
            shrunk = [
                (frames, max(2, height // size.shrink // 2 * 2), max(2, width // size.shrink // 2 * 2))
                for frames, height, width in grids
            ]
            began = time.monotonic()
            outcomes.append(compare(name, shrunk, contenders, size, matmul))
            print(table(outcomes[-1]), flush=True)
            say(f"{name}: {time.monotonic() - began:.1f} s")
    if gpu and contenders.compiled.refused:
        print(f"{contenders.compiled.refused} batches were refused by what is compiled: its numbers are not its own")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    parser.add_argument("--only", action="append", choices=WORKLOADS, default=[])
    parser.add_argument("--smoke", action="store_true", help="a tiny tower in host memory: nothing is measured")
    options = parser.parse_args()
    device = torch.device("cpu") if options.smoke else torch.device("cuda", 0)
    outcomes = run(SMOKE if options.smoke else GPU, device, options.only)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))


if __name__ == "__main__":
    main()
