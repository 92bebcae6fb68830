"""What a vision tower's layer could save on a GPU: `python -m benchmarks.probes.attention`, less than a minute.

Of Qwen3-VL's tower (16 heads 72 wide, 1152 wide, bfloat16), milliseconds a layer and the share of a bfloat16 matrix
product of 8192:

- attention over `gpu_tower`'s batch of 32 sizes, and over 16 of 64x64, by everything that could do it; with the largest
  difference from the first;
- what stands around it, one operation after the other, and what could take the place of several;
- the kernels that take longest in four layers, uncompiled and compiled, the latter also with our rotary kernel.

What fails says why and is passed over. `--smoke` is a small batch in host memory, to see that everything runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu_tower import WORKLOADS, matmul_rate, wait
from tensorferry.stages.adapters.attention import Stretches, attend, stretches_of
from tensorferry.stages.adapters.qwen3_vl import FAMILY
from tensorferry.stages.adapters.rotary import Angles, angles_of, turned

HEADS, HEAD, WIDE, INNER = 16, 72, 1152, 4304
LAYERS = 4  #: where kernels are listed
LISTED = 14
ENOUGH_S = 40.0  #: then no compiler is started any more
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Probe:
    """A device, and how long things take on it."""

    def __init__(self, device: torch.device, shrink: int) -> None:
        self.device, self.shrink = device, shrink
        self.gpu = device.type == "cuda"
        self.rate = matmul_rate(device, torch.bfloat16, 8192 if self.gpu else 64)
        print(f"matrix product: {self.rate / 1e12:,.0f} TFLOP/s")

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def lengths(self, workload: str) -> list[int]:
        return [max(4, prod(grid) // self.shrink) for grid in WORKLOADS[workload]]

    def ms(self, act: Callable[[], object]) -> float:
        """Of one call, the GPU's time, the host being ahead of it."""
        times = 10 if self.gpu else 1
        for _ in range(2 if self.gpu else 0):
            act()
        wait(self.device)
        began = time.perf_counter()
        for _ in range(times):
            act()
        wait(self.device)
        return (time.perf_counter() - began) / times * 1e3

    def line(self, name: str, act: Callable[[], Any], flop: float, expected: torch.Tensor | None = None) -> None:
        try:
            found = act()
            ms = self.ms(act)
            share = f"{100 * flop / (ms / 1e3) / self.rate:5.1f} %" if flop else "       "
            off = "" if expected is None else f"  off by {(found.float() - expected).abs().max().item():.1e}"
            print(f"{name:48} {ms:8.3f} ms {share}{off}", flush=True)
        except Exception as problem:  # whatever a kernel that is not there raises: the next one may be
            print(f"{name:48} {type(problem).__name__}: {str(problem).splitlines()[0][:90]}", flush=True)


# --- attention ----------------------------------------------------------------------------------------------------


def varlen(heads: Heads, stretches: Stretches, *, pad: int = HEAD) -> torch.Tensor:
    """As it is done now. pad: how wide heads are made."""
    q, k, v = heads if pad == HEAD else (functional.pad(x, (0, pad - HEAD)) for x in heads)
    ends, longest = stretches.ends, stretches.longest
    found = varlen_attn(q, k, v, ends, ends, longest, longest, scale=HEAD**-0.5)
    assert isinstance(found, torch.Tensor)
    return found[..., :HEAD]


def cudnn(heads: Heads, stretches: Stretches) -> torch.Tensor:
    """cuDNN's variable lengths, which torch has and does not use."""
    ends, longest = stretches.ends, stretches.longest
    found: torch.Tensor = torch.ops.aten._cudnn_attention_forward(
        *heads, None, ends, ends, longest, longest, False, 0.0, False, False
    )[0]
    return found


def one_by_one(heads: Heads, stretches: Stretches) -> torch.Tensor:
    """Dense attention, stretch by stretch; equal ones, which stand together where they are sorted, in one call."""
    q, k, v = heads
    out = torch.empty_like(q)
    ends = stretches.ends_on_host.tolist()
    first = 0
    for place, (start, end) in enumerate(pairwise(ends)):
        following = ends[place + 2] - end if place + 2 < len(ends) else 0
        if following == end - start:
            continue
        count = (end - first) // (end - start)
        one, other, values = (x[first:end].view(count, -1, HEADS, HEAD).transpose(1, 2) for x in (q, k, v))
        out[first:end] = functional.scaled_dot_product_attention(one, other, values).transpose(1, 2).flatten(0, 1)
        first = end
    return out


def in_two(heads: Heads, parts: Sequence[tuple[slice, Stretches]]) -> torch.Tensor:
    return torch.cat([varlen((heads[0][rows], heads[1][rows], heads[2][rows]), part) for rows, part in parts])


def ends_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def attention(probe: Probe, workload: str) -> None:
    by_size = sorted(probe.lengths(workload), reverse=True)
    lengths = probe.lengths(workload)
    patches, flop = sum(lengths), 4.0 * HEADS * HEAD * sum(length**2 for length in lengths)
    print(f"\nattention over {workload}: {patches:,} patches")
    qkv = probe.randn(patches, 3, HEADS, HEAD)
    heads: Heads = qkv.unbind(1)  # type: ignore[assignment]
    given, ordered = (stretches_of(ends_of(each), probe.device) for each in (lengths, by_size))
    half = next(place for place in range(len(by_size)) if 2 * by_size[place] <= by_size[0] or place + 1 == len(by_size))
    split = sum(by_size[:half])
    parts = [
        (slice(0, split), stretches_of(ends_of(by_size[:half]), probe.device)),
        (slice(split, None), stretches_of(ends_of(by_size[half:]), probe.device)),
    ]
    expected = attend(*heads, given._replace(equal=0)).view(patches, HEADS, HEAD).float()
    expected_by_size = attend(*heads, ordered._replace(equal=0)).view(patches, HEADS, HEAD).float()
    apart: Heads = tuple(x.contiguous() for x in heads)  # type: ignore[assignment]
    probe.line("variable lengths, as it is", lambda: varlen(heads, given), flop, expected)
    probe.line("  q, k and v in memory of their own", lambda: varlen(apart, given), flop, expected)
    probe.line("  longest first", lambda: varlen(heads, ordered), flop, expected_by_size)
    if half:
        probe.line("  the longer half and the others", lambda: in_two(heads, parts), flop, expected_by_size)
    for pad in (80, 96, 128):
        probe.line(f"  heads padded to {pad}", partial(varlen, heads, given, pad=pad), flop, expected)
    for backend in BACKENDS:

        def dense(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return one_by_one(heads, ordered)

        probe.line(f"dense, one size after the other, {backend.name}", dense, flop, expected_by_size)
    probe.line("dense, as torch chooses", lambda: one_by_one(heads, ordered), flop, expected_by_size)
    if probe.gpu:
        third_attention(probe, heads, given, flop, expected)


def by_cudnn(probe: Probe, workload: str) -> None:
    """The last thing that is tried: torch does not use it, and a fault in it may end the process."""
    lengths = probe.lengths(workload)
    patches, flop = sum(lengths), 4.0 * HEADS * HEAD * sum(length**2 for length in lengths)
    print(f"\nattention over {workload} by cuDNN")
    q, k, v = probe.randn(patches, 3, HEADS, HEAD).unbind(1)
    stretches = stretches_of(ends_of(lengths), probe.device)
    expected = attend(q, k, v, stretches._replace(equal=0)).view(patches, HEADS, HEAD).float()
    probe.line("variable lengths", lambda: cudnn((q, k, v), stretches), flop, expected)
    apart = q.contiguous(), k.contiguous(), v.contiguous()
    probe.line("  q, k and v in memory of their own", lambda: cudnn(apart, stretches), flop, expected)


def third_attention(probe: Probe, heads: Heads, stretches: Stretches, flop: float, expected: torch.Tensor) -> None:
    """FlashAttention-3, where it is installed: torch calls it then."""
    try:
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except Exception as problem:  # not this torch, or not installed
        print(f"{'FlashAttention-3':48} {type(problem).__name__}: {str(problem).splitlines()[0][:90]}")
        return
    probe.line("FlashAttention-3, variable lengths", lambda: varlen(heads, stretches), flop, expected)
    restore_flash_attention_impl()


# --- around it ----------------------------------------------------------------------------------------------------


def around(probe: Probe, workload: str) -> None:
    """The operations of a layer but attention, as they are, and others in their place."""
    patches = sum(probe.lengths(workload))
    print(f"\naround attention, {patches:,} patches")
    hidden, inner, qkv = probe.randn(patches, WIDE), probe.randn(patches, INNER), probe.randn(patches, 3, HEADS, HEAD)
    shapes = {"qkv": (3 * WIDE, WIDE), "proj": (WIDE, WIDE), "fc1": (INNER, WIDE), "fc2": (WIDE, INNER)}
    weights = {name: (probe.randn(*shape), probe.randn(shape[0])) for name, shape in shapes.items()}
    norm = probe.randn(WIDE), probe.randn(WIDE)
    for name, (weight, bias) in weights.items():
        into = inner if name == "fc2" else hidden
        probe.line(name, partial(functional.linear, into, weight, bias), 2.0 * patches * weight.numel())
    angles = angles_of(9 * torch.randn(patches, HEAD // 2, device=probe.device))
    probe.line("layer norm, of two", lambda: functional.layer_norm(hidden, (WIDE,), *norm), 0)
    probe.line("residual, of two", lambda: hidden + hidden, 0)
    probe.line("gelu", lambda: functional.gelu(inner, approximate="tanh"), 0)
    probe.line("rotary", lambda: turned(qkv, angles)[0], 0)
    fc1, bias = weights["fc1"]
    flop = 2.0 * patches * fc1.numel()
    apart = functional.gelu(functional.linear(hidden, fc1, bias), approximate="tanh").float()
    probe.line(
        "fc1, then gelu", lambda: functional.gelu(functional.linear(hidden, fc1, bias), approximate="tanh"), flop
    )
    probe.line(
        "fc1 with gelu in it",
        lambda: torch.ops.aten._addmm_activation(bias, hidden, fc1.t(), use_gelu=True),
        flop,
        apart,
    )


# --- kernels ------------------------------------------------------------------------------------------------------


def turned_by_kernel(qkv: torch.Tensor, angles: Angles) -> Heads:
    """`rotary.turned` for a compiled layer, which else makes a kernel of its own."""
    from tensorferry.stages.adapters.rotary_kernel import turn

    turn(qkv, angles.cos, angles.sin)
    q, k, v = qkv.unbind(1)
    return q, k, v


def block_with_kernel(layer: Any, hidden: torch.Tensor, angles: Angles, stretches: Stretches) -> torch.Tensor:
    qkv = layer.attn.qkv(layer.norm1(hidden)).unflatten(-1, (3, layer.attn.num_heads, -1))
    hidden = hidden + layer.attn.proj(attend(*turned_by_kernel(qkv, angles), stretches))
    out: torch.Tensor = hidden + layer.mlp(layer.norm2(hidden))
    return out


def layer_of(probe: Probe) -> Any:
    """One with the parameters of Qwen3-VL's, and its names."""
    with torch.device(probe.device):
        made = SimpleNamespace(
            norm1=torch.nn.LayerNorm(WIDE, eps=1e-6),
            norm2=torch.nn.LayerNorm(WIDE, eps=1e-6),
            attn=torch.nn.ModuleDict({"qkv": torch.nn.Linear(WIDE, 3 * WIDE), "proj": torch.nn.Linear(WIDE, WIDE)}),
            mlp=torch.nn.Sequential(
                torch.nn.Linear(WIDE, INNER), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(INNER, WIDE)
            ),
        )
    layer: Any = torch.nn.Module()
    for name, part in vars(made).items():
        layer.add_module(name, part)
    layer.attn.qkv, layer.attn.proj = made.attn["qkv"], made.attn["proj"]
    layer.attn.num_heads = HEADS
    return layer.to(torch.bfloat16).requires_grad_(False)


def kernels(probe: Probe, began: float) -> None:
    """Of layers as they are and compiled, over equal and over mixed items: how long each is, and its kernels."""
    layer = layer_of(probe)
    blocks: Mapping[str, Any] = {
        "as it is": FAMILY.packing.block,
        "compiled": torch.compile(FAMILY.packing.block, dynamic=True, fullgraph=True),
        "compiled, our rotary kernel": torch.compile(block_with_kernel, dynamic=True, fullgraph=True),
    }
    for workload in ("16 of 64x64", "32 sizes"):
        lengths = probe.lengths(workload)
        hidden = probe.randn(sum(lengths), WIDE)
        angles = angles_of(torch.randn(sum(lengths), HEAD // 2, device=probe.device))
        stretches = stretches_of(ends_of(lengths), probe.device)
        for name, block in blocks.items():
            if name != "as it is" and (not probe.gpu or time.monotonic() - began > ENOUGH_S):
                print(f"\n{LAYERS} layers, {workload}, {name}: passed over")
                continue

            layers = partial(through, block, layer, hidden, angles, stretches)
            print()
            probe.line(f"{LAYERS} layers, {workload}, {name}", layers, 0)
            if probe.gpu:
                listed(layers)


def through(block: Any, layer: Any, hidden: torch.Tensor, angles: Angles, stretches: Stretches) -> torch.Tensor:
    for _ in range(LAYERS):
        hidden = block(layer, hidden, angles, stretches)
    return hidden


def listed(act: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            act()
            torch.cuda.synchronize()
        averages: Any = found.key_averages()
        spent = sorted(averages, key=lambda kernel: -kernel.self_device_time_total)
        for kernel in spent[:LISTED]:
            print(f"  {kernel.self_device_time_total / 1e3 / LAYERS:8.3f} ms a layer {kernel.key[:90]}")
    except Exception as problem:  # of the profiler: the times above are what counts
        print(f"  kernels: {type(problem).__name__}: {problem}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small batch in host memory: nothing is measured")
    options = parser.parse_args()
    began = time.monotonic()
    probe = Probe(torch.device("cpu") if options.smoke else torch.device("cuda", 0), 512 if options.smoke else 1)
    attention(probe, "32 sizes")
    attention(probe, "16 of 64x64")
    around(probe, "32 sizes")
    kernels(probe, began)
    by_cudnn(probe, "32 sizes")
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
