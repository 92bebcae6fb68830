"""Weights by name: seeded, or read from a checkpoint's safetensors files."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tensorferry.stages.plugin import bad_config

CHECKPOINT = "model.safetensors"  #: looked for where a path is a directory
INDEX = "model.safetensors.index.json"  #: and this, of a checkpoint in several files

Shapes = Mapping[str, tuple[int, ...]]
Weights = dict[str, torch.Tensor]


class _Index(msgspec.Struct):
    """What Hugging Face's checkpoints in several files say of themselves; other keys are not read."""

    weight_map: dict[str, str]  #: tensor -> file beside the index


def seeded_weights(shapes: Shapes, seed: int) -> Weights:
    """float32 weights, the same for the same seed: normal over sqrt(inputs), biases 0, norms 1.

    Raises ConfigError naming `model.seed` where it has more than 64 bits.
    """
    if seed >= 1 << 64:
        raise bad_config("model.seed", f"{seed} has more than 64 bits")
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            weights[name] = torch.zeros(shape)
        elif len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
    return weights


def read_weights(
    shapes: Shapes, path: Path, prefixes: Sequence[str] = ("",), parts: tuple[str, ...] = ("",)
) -> Weights:
    """The weights in a safetensors file, or in those of a directory: one file, or several with an index.

    prefixes: what may stand before all names of this model, as in `model.visual.`; the first that occurs is taken, and
    tensors whose names start otherwise, or go on otherwise than with one of `parts`, are another model's. Names and
    shapes are compared before any tensor is read. Raises ConfigError naming `model.path`, file and tensor: missing,
    unknown, of another shape, or not all finite.
    """
    try:
        homes = _homes(path)
        prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in homes)), prefixes[0])
        ours = tuple(prefix + part for part in parts)
        found = {name.removeprefix(prefix): file for name, file in homes.items() if name.startswith(ours)}
        for problem, names in (("lacks", shapes.keys() - found), ("has the unknown", found.keys() - shapes)):
            if names:
                raise bad_config("model.path", f"{path} {problem} tensor {_listed(prefix, names)}")
        weights: Weights = {}
        for file in dict.fromkeys(found.values()):
            _read({name: shapes[name] for name, home in found.items() if home == file}, file, prefix, weights)
    except (OSError, SafetensorError, msgspec.MsgspecError) as problem:
        raise bad_config("model.path", f"cannot read {path}: {problem}") from problem
    return weights


def _homes(path: Path) -> dict[str, Path]:
    """Every tensor of a checkpoint and the file it is in."""
    index = path / INDEX
    if path.is_dir() and index.exists() and not (path / CHECKPOINT).exists():
        named = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        return {name: path / file for name, file in named.items()}
    if path.is_dir():
        path = path / CHECKPOINT
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _read(shapes: Shapes, path: Path, prefix: str, weights: Weights) -> None:
    with safe_open(path, framework="pt") as file:
        if missing := shapes.keys() - {name.removeprefix(prefix) for name in file.keys()}:
            raise bad_config("model.path", f"{path} lacks tensor {_listed(prefix, missing)}, which its index promises")
        for name, shape in shapes.items():
            given = tuple(file.get_slice(prefix + name).get_shape())
            if given != shape:
                raise bad_config("model.path", f"{path}: tensor {prefix}{name} has shape {given}, not {shape}")
        for name in shapes:
            tensor = file.get_tensor(prefix + name)
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise bad_config("model.path", f"{path}: tensor {prefix}{name} is not all finite floating point")
            weights[name] = tensor


def _listed(prefix: str, names: Collection[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(prefix + name for name in sorted(names)[:most]) + rest
