"""Weights by name: seeded, or read from a checkpoint's safetensors files."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tensorferry.codecs.memory.free_memory import available_nbytes
from tensorferry.stages.checkpoint import check_regular
from tensorferry.stages.plugin import bad_config

CHECKPOINT = "model.safetensors"  #: looked for where a path is a directory
INDEX = "model.safetensors.index.json"  #: and this, of a checkpoint in several files

#: Accepted dtypes of weights, as a safetensors header calls them. Narrower floats come with scales, and torch cannot
#: check some of them for NaN.
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Weights = dict[str, torch.Tensor]


class Header(NamedTuple):
    """A tensor's entry in the header of a safetensors file."""

    file: Path
    dtype: str  #: as the header calls it: `F32`, `F8_E4M3`
    shape: Shape


class _Index(msgspec.Struct):
    """The index of Hugging Face's checkpoints in several files; other keys are not read."""

    weight_map: dict[str, Any]  #: tensor -> file beside the index, not checked yet


def seeded_weights(shapes: Shapes, seed: int, key: str = "model") -> Weights:
    """float32 weights, the same for the same seed: normal over sqrt(inputs), biases 0, norms 1.

    key: of sizes and seed in the deployment file. Raises ConfigError that names it if the seed has more than 64 bits,
    or if the weights do not fit into the available memory.
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
    tensors whose names start otherwise, or go on otherwise than with one of `parts`, are another model's. Names, shapes
    and dtypes are compared before any tensor is read. Raises ConfigError naming `model.path`, file and tensors: all
    that are missing, unknown, of another shape or of a dtype beside DTYPES, or the first that is not all finite; a
    file that is none, or elsewhere.
    """
    files = tensor_files("model.path", path)
    prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in files)), prefixes[0])
    ours = tuple(prefix + part for part in parts)
    headers = read_headers("model.path", {name: file for name, file in files.items() if name.startswith(ours)})
    wanted = {prefix + name: shape for name, shape in shapes.items()}
    differing = differences(
        wanted.keys() - headers,
        headers.keys() - wanted,
        {name: (headers[name].shape, wanted[name]) for name in headers.keys() & wanted},
    )
    if differing:
        raise bad_config("model.path", f"{path} {differing}")
    weights: Weights = {}
    for file, names in _by_file(files, headers).items():
        if other := {f"{name} of {headers[name].dtype}" for name in names if headers[name].dtype not in DTYPES}:
            taken = ", ".join(DTYPES.values())
            remedy = f"weights are taken in {taken}; convert them, or name a checkpoint that is not quantised"
            raise bad_config("model.path", f"{file} has tensor {listed(other)}; {remedy}")
    for file, names in _by_file(files, headers).items():
        with _opened("model.path", file) as opened:
            for name in names:
                tensor = opened.get_tensor(name)
                if not tensor.isfinite().all():
                    raise bad_config("model.path", f"{file}: tensor {name} is not all finite, but has NaN or infinity")
                weights[name.removeprefix(prefix)] = tensor
    return weights


def tensor_files(key: str, path: Path) -> dict[str, Path]:
    """Every tensor of a checkpoint, a safetensors file or a directory, and the file it is in.

    Raises ConfigError naming `key` and the file that cannot be read; of an index also what it says of a tensor, where
    that is no file beside it. Of a checkpoint in several files none but the index is opened."""
    index = path / INDEX
    if path.is_dir() and index.exists() and not (path / CHECKPOINT).exists():
        check_regular(key, index)
        try:
            named = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (OSError, msgspec.MsgspecError) as problem:
            raise bad_config(key, f"cannot read {index}: {problem}; {_AGAIN}") from problem
        for name, file in named.items():
            if not isinstance(file, str) or not _is_beside(file):
                raise bad_config(key, f"{index} names {file!a} for tensor {name}; only files beside it are read")
        return {name: path / file for name, file in named.items()}
    if path.is_dir():
        path = path / CHECKPOINT
    check_regular(key, path)
    with _opened(key, path) as opened:
        return dict.fromkeys(opened.keys(), path)


def read_headers(key: str, files: Mapping[str, Path]) -> dict[str, Header]:
    """Of these tensors. files: where each is. Raises ConfigError naming `key` and the first file that is not regular,
    cannot be read or lacks a tensor."""
    by_file = _by_file(files, files)
    for file in by_file:
        check_regular(key, file)
    headers = {}
    for file, names in by_file.items():
        with _opened(key, file) as opened:
            if missing := set(names) - set(opened.keys()):
                raise bad_config(key, f"{file} lacks tensor {listed(missing)}, which its index promises")
            for name in names:
                tensor = opened.get_slice(name)
                headers[name] = Header(file, tensor.get_dtype(), tuple(tensor.get_shape()))
    return headers


def differences(missing: Collection[str], unknown: Collection[str], shapes: Mapping[str, tuple[Shape, Shape]]) -> str:
    """How the tensors of a checkpoint differ from the model's; "" if they are the same.

    shapes: of tensors, the found and the expected shape."""
    problems = []
    if missing:
        problems.append(f"lacks tensor {listed(missing)}")
    if unknown:
        problems.append(f"has the unknown tensor {listed(unknown)}")
    if differing := {
        f"{name} of shape {given}, not {wanted}" for name, (given, wanted) in shapes.items() if given != wanted
    }:
        problems.append(f"has tensor {listed(differing)}")
    return "; ".join(problems)


def listed(names: Collection[str], most: int = 8) -> str:
    """The first of them in order, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + rest


_AGAIN = "fetch the file again"


def _is_beside(file: str) -> bool:
    """Whether a name in an index is a file in its folder or below: not the folder itself, and nothing outside."""
    path = Path(file)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


def _by_file(files: Mapping[str, Path], names: Collection[str]) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {}
    for name in names:
        found.setdefault(files[name], []).append(name)
    return found


@contextmanager
def _opened(key: str, path: Path) -> Iterator[Any]:
    """A safetensors file. Errors while it is read become ConfigErrors that name it, as its library's do not."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as problem:
        raise bad_config(key, f"cannot read {path}: {problem}; {_AGAIN}") from problem
