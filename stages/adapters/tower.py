"""A vision tower of the transformers library behind the adapter interface: configuration, weights, one pass a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tensorferry.codecs.errors import BadItem, BadTensor
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.config import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.grids import check_grid
from tensorferry.stages.adapters.options import TowerOptions
from tensorferry.stages.adapters.tables import Grid, TableCache, Tables, joined
from tensorferry.stages.plugin import bad_config, read_options
from tensorferry.stages.weights import read_weights, seeded_weights

CONFIG = "config.json"  #: of a checkpoint directory
#: What stands before a vision weight's name, in checkpoints of Qwen3-VL and in those of Qwen2.5-VL.
PREFIXES = ("model.visual.", "visual.")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FEATURE_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Family:
    """What one family of models differs in from the others."""

    adapter: str  #: its name in a deployment file
    model_types: Sequence[str]  #: what `model_type` in a checkpoint's config.json may be
    tower: Any  #: transformers' class; `forward(pixels, grid_thw, **tables)`
    architecture: Mapping[str, Any]  #: the fields of its vision configuration that differ from the class's defaults
    tiny: Mapping[str, Any]  #: and those of one for tests
    #: (tower, grid as an int64 (1, 3) on the host) -> what `forward` takes
    tables: Callable[[Any, torch.Tensor], Tables]
    #: What `forward` returned -> outputs by name, `embeddings` first; rows are their last dimension but one.
    outputs: Callable[[Any], dict[str, torch.Tensor]]


class Tower:
    """See the module. An item attends to itself alone, each frame of a video to itself."""

    def __init__(self, family: Family, spec: ModelSpec, threads: int) -> None:
        """Make or read the weights, and set how many threads torch uses in this whole process.

        With `spec.path`, a checkpoint directory, its config.json decides the architecture, and of its weights those of
        the vision tower are read; without, they are seeded. Raises ConfigError naming option, or file and key.
        """
        self._options = read_options("model.options", family.adapter, TowerOptions, spec.options)
        self._family = family
        torch.set_num_threads(threads)
        config = family.tower.config_class(**_fields(family, spec, self._options))
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = family.tower(config).eval()
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if spec.path is None or self._options.random_weights:
            weights = seeded_weights(shapes, spec.seed)
        else:
            weights = read_weights(shapes, Path(spec.path), PREFIXES)
        self._dtype = _DTYPES[self._options.dtype]
        model.load_state_dict({name: tensor.to(self._dtype) for name, tensor in weights.items()}, assign=True)
        model.rotary_pos_emb = type(model.rotary_pos_emb)(config)  # its frequencies are no weights, and still float32
        self._model: Any = model.requires_grad_(False)
        self._merge: int = config.spatial_merge_size
        self._features_wide: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self._tables = TableCache(self._tables_of)
        self._device = torch.device("cpu")

    @property
    def model(self) -> Any:
        """transformers' module, for comparison."""
        return self._model

    @torch.inference_mode()
    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        """All items in one forward pass. The host waits for the device once, to know that all numbers are finite.

        Raises BadItem for the first item whose numbers disagree or whose embeddings are not all finite (NaN or
        infinity among its pixels, or values beyond the dtype); BadTensor for features that the tower does not take.
        """
        if not items:
            return
        for item in items:
            check_grid(item, self._merge)
        features = self._features(load([item.index for item in items]), sum(item.patches for item in items))
        self._follow(features.device)
        outputs = self._forward(features, [item.grid for item in items])
        if not torch.stack([tensor.isfinite().all() for tensor in outputs.values()]).all():
            self._blame(items, features, outputs)
        start = 0
        for item in items:
            for name, tensor in outputs.items():
                rows = tensor.narrow(-2, start, item.rows)
                out(item.index, name, tuple(rows.shape), self._options.dtype).torch().copy_(rows)
            start += item.rows

    def _features(self, view: View, patches: int) -> torch.Tensor:
        expected = (patches, self._features_wide)
        if view.shape != expected or view.dtype not in _FEATURE_DTYPES:
            wanted = f"floating-point {expected}; see patch_size and temporal_patch_size in tokenizer.options"
            raise BadTensor(f"features are {view.dtype} {view.shape}, {self._family.adapter} takes {wanted}")
        return view.torch()

    def _follow(self, device: torch.device) -> None:
        """Have the weights where the features are; they move once."""
        if device != self._device:
            self._model.to(device)
            self._device = device

    def _forward(self, features: torch.Tensor, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        batch = joined(self._tables.get(grids, features.device))
        result = self._model(features.to(self._dtype), grid_thw=torch.tensor(grids), **batch)
        return self._family.outputs(result)

    def _tables_of(self, grid: Grid) -> Tables:
        return self._family.tables(self._model, torch.tensor([grid]))

    def _blame(self, items: Sequence[ItemInfo], features: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> None:
        """Raise for the first item at fault."""
        patch = row = 0
        for item in items:
            if not features[patch : patch + item.patches].isfinite().all():
                raise BadItem(item.index, "its pixels hold NaN or infinity")
            if not all(tensor.narrow(-2, row, item.rows).isfinite().all() for tensor in outputs.values()):
                raise BadItem(item.index, f"its embeddings overflow {self._options.dtype}")
            patch, row = patch + item.patches, row + item.rows


class _Config(msgspec.Struct):
    """What is read of a checkpoint's config.json."""

    model_type: str
    vision_config: dict[str, Any]


def _fields(family: Family, spec: ModelSpec, options: TowerOptions) -> Mapping[str, Any]:
    """The tower's configuration: the checkpoint's, or the family's own."""
    if spec.path is None:
        return family.tiny if options.tiny else family.architecture
    if options.tiny:
        raise bad_config("model.options.tiny", f"the configuration is that of model.path, {spec.path}; leave one away")
    file = Path(spec.path) / CONFIG
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as problem:
        raise bad_config("model.path", f"cannot read {file}: {problem}") from problem
    if config.model_type not in family.model_types:
        wanted = ", ".join(family.model_types)
        raise bad_config("model.path", f"{file}: model_type is {config.model_type!r}; {family.adapter} takes {wanted}")
    known = family.tower.config_class.__annotations__
    fields = {key: value for key, value in config.vision_config.items() if key in known}
    try:
        family.tower.config_class(**fields)
    except Exception as problem:  # transformers' own checks raise classes of their own
        raise bad_config("model.path", f"{file}: vision_config: {' '.join(str(problem).split())}") from problem
    return fields
