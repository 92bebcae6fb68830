"""Weights by name: seeded, or read from a checkpoint's safetensors files."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tensorferry.codecs.memory.available import available_nbytes
from tensorferry.stages.checkpoint import check_regular
from tensorferry.stages.plugin import bad_config

CHECKPOINT = "model.safetensors"  #: looked for where a path is a directory
INDEX = "model.safetensors.index.json"  #: and this, of a checkpoint in several files

Shapes = Mapping[str, tuple[int, ...]]
Weights = dict[str, torch.Tensor]


class _Index(msgspec.Struct):
    """What Hugging Face's checkpoints in several files say of themselves; other keys are not read."""

    weight_map: dict[str, str]  #: tensor -> file beside the index


def seeded_weights(shapes: Shapes, seed: int, key: str = "model") -> Weights:
    """float32 weights, the same for the same seed: normal over sqrt(inputs), biases 0, norms 1.

    key: where sizes and seed stand in the deployment file. Raises ConfigError naming it where the seed has more than 64
    bits, or the memory does not hold so many weights.
    """
    if seed >= 1 << 64:
        raise bad_config(f"{key}.seed", f"{seed} has more than 64 bits")
    nbytes, available = 4 * sum(map(math.prod, shapes.values())), available_nbytes()
    if nbytes > available:
        raise bad_config(key, f"{nbytes} bytes of weights, and {available} are available; make the model smaller")
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
    shapes are compared before any tensor is read. Raises ConfigError naming `model.path`, file and tensors: all that
    are missing, unknown or of another shape, or the first that is not all finite; a file that is none, or elsewhere.
    """
    try:
        homes = _homes(path)
        prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in homes)), prefixes[0])
        ours = tuple(prefix + part for part in parts)
        found = {name.removeprefix(prefix): file for name, file in homes.items() if name.startswith(ours)}
        names: dict[Path, list[str]] = {}
        for name, file in found.items():
            names.setdefault(file, []).append(name)
        for file in names:
            check_regular("model.path", file)
        given = {name: shape for file in names for name, shape in _shapes(file, names[file], prefix).items()}
        if problems := list(_differences(prefix, shapes, given)):
            raise bad_config("model.path", f"{path} {'; '.join(problems)}")
        weights: Weights = {}
        for file in names:
            _read(names[file], file, prefix, weights)
    except (OSError, SafetensorError, msgspec.MsgspecError) as problem:
        raise bad_config("model.path", f"cannot read {path}: {problem}") from problem
    return weights


def _homes(path: Path) -> dict[str, Path]:
    """Every tensor of a checkpoint and the file it is in."""
    index = path / INDEX
    if path.is_dir() and index.exists() and not (path / CHECKPOINT).exists():
        check_regular("model.path", index)
        named = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        for file in dict.fromkeys(named.values()):
            if os.path.isabs(file) or ".." in Path(file).parts or "\0" in file:
                raise bad_config("model.path", f"{index} names {file!a}; only files beside it are read")
        return {name: path / file for name, file in named.items()}
    if path.is_dir():
        path = path / CHECKPOINT
    check_regular("model.path", path)
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _shapes(path: Path, names: Collection[str], prefix: str) -> dict[str, tuple[int, ...]]:
    """Of these tensors of a file, from its header."""
    with safe_open(path, framework="pt") as file:
        if missing := set(names) - {name.removeprefix(prefix) for name in file.keys()}:
            raise bad_config("model.path", f"{path} lacks tensor {_listed(prefix, missing)}, which its index promises")
        return {name: tuple(file.get_slice(prefix + name).get_shape()) for name in names}


def _differences(prefix: str, shapes: Shapes, given: Shapes) -> Iterator[str]:
    """What is to be said of a checkpoint whose tensors are not the model's."""
    if missing := shapes.keys() - given:
        yield f"lacks tensor {_listed(prefix, missing)}"
    if unknown := given.keys() - shapes:
        yield f"has the unknown tensor {_listed(prefix, unknown)}"
    differing = {
        f"{name} of shape {given[name]}, not {shape}"
        for name, shape in shapes.items()
        if name in given and given[name] != shape
    }
    if differing:
        yield f"has tensor {_listed(prefix, differing)}"


def _read(names: Collection[str], path: Path, prefix: str, weights: Weights) -> None:
    with safe_open(path, framework="pt") as file:
        for name in names:
            tensor = file.get_tensor(prefix + name)
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise bad_config("model.path", f"{path}: tensor {prefix}{name} is not all finite floating point")
            weights[name] = tensor


def _listed(prefix: str, names: Collection[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(prefix + name for name in sorted(names)[:most]) + rest
