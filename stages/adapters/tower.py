"""A vision tower as a model adapter, with transformers' configuration and weights, and one forward pass a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import structlog
import torch

from tensorferry.codecs.errors import BadItem, BadTensor
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.architecture import Vision, read_vision
from tensorferry.stages.adapters.attention import takes_unequal
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out
from tensorferry.stages.adapters.grid_checks import check_grid
from tensorferry.stages.adapters.grid_tables import Grid, TableCache, Tables, joined
from tensorferry.stages.adapters.options import PackedOptions, TowerOptions
from tensorferry.stages.adapters.packed_forward import Packed, Packing
from tensorferry.stages.adapters.rotary import has_kernel
from tensorferry.stages.plugin import bad_config, read_options
from tensorferry.stages.weights import read_weights, seeded_weights

log = structlog.get_logger()

#: Prefixes of the names of vision weights in checkpoints of Qwen3-VL and of Qwen2.5-VL.
QWEN_PREFIXES = ("model.visual.", "visual.")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FEATURE_DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Heights of the items, each a block wide, in batches of each kind that torch compiles anew (one stretch of patches,
#: equal ones, others). They are unusual numbers, because torch identifies two sizes that are equal the first time.
_KINDS = ((7,), (7, 7), (7, 5))


@dataclass(frozen=True, slots=True)
class Family:
    """The differences between one family of models and the others."""

    adapter: str  #: its name in a deployment file
    vision: type[Vision]  #: the struct of its configuration
    tower: Any  #: transformers' class; `forward(pixels, grid_thw, **tables)`
    architecture: Mapping[str, Any]  #: the fields of its vision configuration that differ from the class's defaults
    tiny: Mapping[str, Any]  #: the same fields for a small tower for tests
    #: (tower, grid as an int64 (1, 3) on the host) -> arguments of `forward`
    tables: Callable[[Any, torch.Tensor], Tables]
    packing: Packing  #: the forward pass with the weights of `tower`
    settle: Callable[[Any, Any], None]  #: (tower, its configuration): the last step, once it has its weights
    #: With `attention: eager`: result of `forward` -> the outputs of `packing`.
    outputs: Callable[[Any], dict[str, torch.Tensor]] | None = None
    options: type[PackedOptions] = TowerOptions
    prefixes: Sequence[str] = ("",)  #: possible prefixes of all names in a checkpoint
    parts: tuple[str, ...] = ("",)  #: starts, behind the prefix, of the names of the tower; see `read_weights`
    frames_become_one: bool = False  #: all frames of an item share one frame's embeddings


class Tower:
    """See the module. An item attends only to itself, and each frame of a video only to itself."""

    def __init__(self, family: Family, spec: ModelSpec, threads: int) -> None:
        """Make or read the weights, and set the number of torch's threads in this whole process.

        With `spec.path`, a checkpoint directory, its config.json decides the architecture, and the vision tower's
        weights are read. Without it, the weights are seeded. Raises ConfigError that names option, or file and key.
        """
        self._options = read_options("model.options", family.adapter, family.options, spec.options)
        self._family = family
        torch.set_num_threads(threads)
        fields = _fields(family, spec, self._options)
        try:
            config = family.tower.config_class(**fields)
            config._attn_implementation = "sdpa"
            with torch.device("meta"):
                model = family.tower(config).eval()
        except Exception as problem:  # transformers' checks raise classes of their own
            reason = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
            raise bad_config("model.path", f"{spec.path}: its vision_config describes no tower: {reason}") from problem
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if spec.path is None or self._options.random_weights:
            weights = seeded_weights(shapes, spec.seed)
        else:
            weights = read_weights(shapes, Path(spec.path), family.prefixes, family.parts)
        self._dtype = _DTYPES[self._options.dtype]
        model.load_state_dict({name: tensor.to(self._dtype) for name, tensor in weights.items()}, assign=True)
        family.settle(model, config)
        self._model: Any = model.requires_grad_(False)
        self._head_width: int = config.hidden_size // config.num_attention_heads
        self._merge: int = config.spatial_merge_size
        self._features_wide: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self._tables = TableCache(self._tables_of)
        self._device = torch.device("cpu")
        self._packed: Packed | None = None
        if not (isinstance(self._options, TowerOptions) and self._options.attention == "eager"):
            self._packed = Packed(family.packing, model, compile=self._options.compile)
        self._warm: set[torch.device] = set()

    @property
    def model(self) -> Any:
        """transformers' module, whose weights these are; for comparison."""
        return self._model

    @property
    def refused(self) -> int:
        """Batches that went through uncompiled layers, against `compile: true`; each was logged."""
        return self._packed.refused if self._packed is not None else 0

    def warm_up(self, device: int | None) -> None:
        """Move the weights to this GPU, load kernels, and compile the layers if `compile` is set: seconds to a minute.
        None: host memory. Raises ConfigError that names model.options.compile if torch cannot compile the layers.
        """
        self._follow(torch.device("cpu") if device is None else torch.device("cuda", device))

    @torch.inference_mode()
    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        """Encode all items in one forward pass. On a GPU the pass is only queued, and the returned function waits for
        it and checks that all numbers are finite.

        Raises BadItem for the first item whose grid, patches and rows disagree, or whose embeddings are not all finite
        (NaN or infinity among its pixels, or values beyond the dtype). Raises BadTensor for features that the tower
        does not take.
        """
        if not items:
            return None
        for item in items:
            check_grid(item, self._merge, frames_become_one=self._family.frames_become_one)
        features = self._features(load([item.index for item in items]), sum(item.patches for item in items))
        self._follow(features.device)
        outputs = self.forward(features, [item.grid for item in items])
        finite = torch.stack([tensor.isfinite().all() for tensor in outputs.values()]).all()
        if features.device.type != "cuda" and not finite:
            self._blame(items, features, outputs)
        start = 0
        for item in items:
            for name, tensor in outputs.items():
                rows = tensor.narrow(-2, start, item.rows)
                out(item.index, name, tuple(rows.shape), self._options.dtype).torch().copy_(rows)
            start += item.rows
        if features.device.type != "cuda":
            return None
        known = _OnHost(finite)

        @torch.inference_mode()
        def finish() -> None:
            if not known.value():
                self._blame(items, features, outputs)

        return finish

    def _features(self, view: View, patches: int) -> torch.Tensor:
        expected = (patches, self._features_wide)
        if view.shape != expected or view.dtype not in _FEATURE_DTYPES:
            wanted = f"floating-point {expected}; see patch_size and temporal_patch_size in tokenizer.options"
            raise BadTensor(f"features are {view.dtype} {view.shape}, {self._family.adapter} takes {wanted}")
        return view.torch()

    @torch.inference_mode()
    def _follow(self, device: torch.device) -> None:
        """Move the weights to the device of the features, once, and warm up there."""
        if device != self._device:
            with torch.inference_mode(False):
                self._model.to(device)
            self._device = device
        if device in self._warm or self._packed is None:
            return
        self._warm.add(device)
        if device.type != "cuda" and not self._options.compile:
            return
        began = time.monotonic()
        try:
            with _current(device):
                for kind in _KINDS:
                    grids = [(1, height * self._merge, self._merge) for height in kind]
                    patches = sum(map(prod, grids))
                    features = torch.zeros(patches, self._features_wide, dtype=self._dtype, device=device)
                    self._packed.warm_up(features, self.batch(grids, device))
            self._packed.warmed_up()
        except Exception as problem:  # of torch's compiler, or of the C compiler
            if not self._options.compile:
                raise
            reason = f"torch cannot compile the tower on {device}: {type(problem).__name__}: {problem}"
            raise bad_config("model.options.compile", f"{reason}; make it false") from problem
        log.info(
            "tower_warmed_up",
            device=str(device),
            compiled=self._options.compile,
            unequal_stretches="together" if takes_unequal(device, self._dtype, self._head_width) else "one by one",
            rotary="kernel" if has_kernel(device) else "written out",
            s=round(time.monotonic() - began, 1),
        )

    def forward(self, features: torch.Tensor, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        """Run the forward pass. features: of items of these grids, one after the other, on the device of `warm_up`.
        Returns the outputs, items one after the other. The work is queued on the device's current stream, and nothing
        is read back."""
        with _current(features.device):
            batch, features = self.batch(grids, features.device), features.to(self._dtype)
            if self._packed is not None:
                return self._packed(features, batch)
            assert self._family.outputs is not None  # only a family that has it has the option
            return self._family.outputs(self._model(features, grid_thw=torch.tensor(grids), **batch))

    def batch(self, grids: Sequence[Grid], device: torch.device) -> dict[str, torch.Tensor]:
        """The arguments of a forward pass for a batch of these grids, in order; see `grid_tables.joined`."""
        return joined(self._tables.get(grids, device))

    def _tables_of(self, grid: Grid) -> Tables:
        return self._family.tables(self._model, torch.tensor([grid]))

    def _blame(self, items: Sequence[ItemInfo], features: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> None:
        """Raise BadItem for the first item at fault."""
        patch = row = 0
        for item in items:
            if not features[patch : patch + item.patches].isfinite().all():
                raise BadItem(item.index, "its pixels hold NaN or infinity")
            if not all(tensor.narrow(-2, row, item.rows).isfinite().all() for tensor in outputs.values()):
                raise BadItem(item.index, f"its embeddings overflow {self._options.dtype}")
            patch, row = patch + item.patches, row + item.rows


class _OnHost:
    """A truth value on its way from a GPU. Waiting for it does not include the work queued behind it."""

    def __init__(self, there: torch.Tensor) -> None:
        with _current(there.device):
            self._here = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(there, non_blocking=True)
            # The waiting thread sleeps, so that it does not disturb the thread that launches kernels.
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()

    def value(self) -> bool:
        self._copied.synchronize()
        return bool(self._here)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one: kernels that are not torch's own run on its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def make_rotary(model: Any, config: Any) -> None:
    """Make the rotary frequencies of Qwen's towers; they are no weights, and stay float32."""
    model.rotary_pos_emb = type(model.rotary_pos_emb)(config)


def _fields(family: Family, spec: ModelSpec, options: PackedOptions) -> Mapping[str, Any]:
    """The tower's configuration: the checkpoint's, checked, or the family's own."""
    if spec.path is None:
        return family.tiny if options.tiny else family.architecture
    if options.tiny:
        raise bad_config("model.options.tiny", f"the configuration is that of model.path, {spec.path}; leave one away")
    return read_vision(family.adapter, family.vision, spec.path)[1]
