"""A tower's forward pass over a packed batch: transformers' weights, and none of its loops over images.

Its layers are a family's `block`, which torch.compile may compile: once for all layers, and for batches of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch

from tensorferry.stages.adapters.attention import Stretches
from tensorferry.stages.adapters.rotary import Angles

log = structlog.get_logger()


class Block(Protocol):
    """One layer of a tower."""

    def __call__(self, layer: Any, hidden: torch.Tensor, angles: Angles, stretches: Stretches) -> torch.Tensor:
        """layer: transformers' module. hidden: (patches, width). Returns the same, for the next layer."""


class Pass(Protocol):
    """What a family does with a batch."""

    def __call__(
        self, model: Any, block: Block, features: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """model: transformers' module. features: (patches, features), in its dtype and on its device. batch:
        `tables.joined`. Returns outputs by name, `embeddings` first; rows are their last dimension but one. Reads
        nothing back from the device."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The two of a family."""

    run: Pass
    block: Block


class Packed:
    """See the module."""

    def __init__(self, packing: Packing, model: Any, *, compile: bool) -> None:
        """compile: whether to compile the layers; `warm_up` then does so, as it takes tens of seconds."""
        self._packing, self._model = packing, model
        self._compiled: Block | None = None
        if compile:
            # Parameters keep their sizes, so all layers share what is compiled; nothing else is taken for constant.
            # Padding of shapes would be: it compares the number of patches with what the GPU can do.
            options: dict[str, Any] = {"shape_padding": False}
            self._compiled = torch.compile(packing.block, dynamic=True, fullgraph=True, options=options)
        self._refused = 0

    def warmed_up(self) -> None:
        """All kinds of batches were there. The processes of torch's compiler end, as many as there are cores up to 32,
        which else live as long as this one."""
        if self._compiled is not None:
            from torch._inductor import async_compile  # takes a third of a second, and torch.compile has imported it

            async_compile.shutdown_compile_workers()

    @property
    def refused(self) -> int:
        """Batches that went through uncompiled layers since what is compiled does not take them."""
        return self._refused

    def warm_up(self, features: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> None:
        """Run a batch whose kind was not there yet: kernels are loaded, and layers compiled where they are to be."""
        self._packing.run(self._model, self._compiled or self._packing.block, features, batch)

    def __call__(self, features: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Pass`. Compiles nothing: a batch that would make torch do so goes through uncompiled layers, is counted
        and logged, as a request waits for it."""
        if self._compiled is not None:
            try:
                with torch.compiler.set_stance("fail_on_recompile"):
                    return self._packing.run(self._model, self._compiled, features, batch)
            except RuntimeError as problem:
                if "recompile" not in str(problem):
                    raise
                self._refused += 1
                log.warning("batch_not_compiled", patches=len(features), refused=self._refused, problem=str(problem))
        return self._packing.run(self._model, self._packing.block, features, batch)
