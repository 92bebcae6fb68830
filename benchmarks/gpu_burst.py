"""GPU memory while a trace with a burst is replayed: `python -m benchmarks.gpu_burst [--json FILE] [--svg FILE]`.

On a machine with a GPU. A deployment with `transport: cuda_vmm` is started, a warm-up is replayed (kernels and torch's
caches stay) and its pools go idle; then comes the burst, and a lone request long after it. Sampled meanwhile: what the
driver says is in use, by whomever, its least value being the zero line; and what the pools say they have mapped. The
rest is torch's caches, which grow with the batches that an encoder meets. `--svg` draws the curves, and needs
matplotlib; `--from FILE` draws those that `--json` wrote, anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.cpu import running
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import Deployment

MIB = 1 << 20
SAMPLE_S, ASK_S = 0.01, 0.05
IDLE_S = 3.0  #: the default of `pool.idle_s`
BURST_MS, LAST_MS = 1000, 7000  #: when the burst and the lone request come
REQUESTS, IMAGES = 24, 4  #: at one instant; 1024x768 each
BUDGET_MB, EMBEDDINGS_MB = 1024, 256
DEPLOYMENT = f"""
name: burst
transport: cuda_vmm
runtime_dir: {{folder}}/run
model: {{{{adapter: patch-vit}}}}
tokenizer: {{{{workers: 2, threads: 4, processor: qwen2-vl, devices: [0]}}}}
encoder: {{{{ranks: 1, devices: [0]}}}}
scheduler: {{{{groups: 1, tp_size: 1, devices: [0]}}}}
pool: {{{{budget_mb: {BUDGET_MB}}}}}
embeddings_pool: {{{{budget_mb: {EMBEDDINGS_MB}}}}}
timeouts: {{{{heartbeat_s: 0.1}}}}
"""
Samples = list[tuple[float, float]]  #: (seconds, MiB)


def trace(*bursts: tuple[int, int]) -> str:
    """(milliseconds, requests) of each burst."""
    images = [{"width": 1024, "height": 768}] * IMAGES
    rows = [
        {"at_ms": at, "text_tokens": 10, "images": images, "output_tokens": 1} for at, n in bursts for _ in range(n)
    ]
    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)


def replay(folder: Path, text: str) -> dict[str, Any]:
    """Its summary."""
    file, out = folder / "trace.jsonl", folder / "out"
    file.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tensorferry", "replay", str(file), "--config", str(folder / "deployment.yaml")]
    subprocess.run([*command, "--attach", "--out", str(out), "--overwrite"], check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = msgspec.json.decode((out / "summary.json").read_bytes())
    return summary


@contextmanager
def sampled(cuda: Driver, deployment: Deployment) -> Iterator[tuple[Samples, Samples]]:
    """What is in use on the GPU, and mapped by pools, until the block ends."""
    used: Samples = []
    mapped: Samples = []
    ended, started = threading.Event(), time.monotonic()

    def look() -> None:
        with cuda.context(0):
            while not ended.wait(SAMPLE_S):
                free, total = cuda.call("cuMemGetInfo")
                used.append((time.monotonic() - started, (int(total) - int(free)) / MIB))

    async def ask() -> None:
        async with Client.connect(deployment) as client:
            while not ended.is_set():
                gauges = [gauge for member in await client.refresh() for gauge in member.gauges]
                nbytes = sum(gauge.value for gauge in gauges if gauge.name == "pool_mapped_nbytes")
                mapped.append((time.monotonic() - started, nbytes / MIB))
                await asyncio.sleep(ASK_S)

    threads = [threading.Thread(target=look), threading.Thread(target=lambda: asyncio.run(ask()))]
    for thread in threads:
        thread.start()
    try:
        yield used, mapped
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def measure() -> dict[str, Any]:
    cuda = Driver.load()
    with TemporaryDirectory(prefix="ferry-") as name, running(Path(name), DEPLOYMENT) as deployment, cuda.context(0):
        folder = Path(name)
        replay(folder, trace((0, REQUESTS)))
        time.sleep(IDLE_S + 1)  # idleness is what is looked at: nobody tells when a chunk is given back
        with sampled(cuda, deployment) as (used, mapped):
            summary = replay(folder, trace((0, 1), (BURST_MS, REQUESTS), (LAST_MS, 1)))
            time.sleep(IDLE_S + 1)  # the end of the curve
    least = min(mib for _, mib in used)
    return {
        "requests": summary["requests"],
        "used": [(round(s, 3), mib - least) for s, mib in used],
        "mapped": [(round(s, 3), mib) for s, mib in mapped],
    }


def draw(found: dict[str, Any], file: str) -> None:
    pyplot: Any = import_module("matplotlib.pyplot")
    (seconds, used), (asked, mapped) = (zip(*found[name], strict=True) for name in ("used", "mapped"))
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    axes.axhline(BUDGET_MB + EMBEDDINGS_MB, color="0.5", linestyle="--", linewidth=1)
    axes.annotate(
        "what pools of a fixed size hold all the time", (seconds[0], BUDGET_MB + EMBEDDINGS_MB - 70), color="0.4"
    )
    axes.plot(seconds, used, color="#1f6f8b", linewidth=1.5, label="in use, beyond the idle deployment's")
    axes.step(asked, mapped, color="#c8553d", linewidth=1.5, where="post", label="mapped by the pools")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    axes.set(xlabel="s", ylabel="MiB of GPU memory", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the curve there")
    parser.add_argument("--from", dest="found", type=Path, help="take the curve from there, and measure nothing")
    parser.add_argument("--svg", help="draw the curve there")
    options = parser.parse_args()
    found = msgspec.json.decode(options.found.read_bytes()) if options.found else measure()
    if options.json:
        options.json.write_bytes(msgspec.json.encode(found))
    print(f"requests: {found['requests']}")
    for name, title in (("used", "GPU memory beyond the idle deployment's"), ("mapped", "mapped by its pools")):
        mib = [each for _, each in found[name]]
        print(f"{title}, MiB: at first {mib[0]:,.0f}, at most {max(mib):,.0f}, at the end {mib[-1]:,.0f}")
    if options.svg:
        draw(found, options.svg)


if __name__ == "__main__":
    main()
