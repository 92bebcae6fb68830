"""A tower's forward pass over a packed batch, with transformers' weights and without its loops over images.

torch.compile may compile a family's `block`, once for all layers and for batches of any size.
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
    """The forward pass of a family."""

    def __call__(
        self, model: Any, block: Block, features: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """model: transformers' module. features: (patches, features), in its dtype and on its device. batch:
        `tables.joined`. Returns outputs by name, `embeddings` first; rows are their last dimension but one. It
        reads nothing back from the device."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The forward pass and the layer of a family."""

    run: Pass
    block: Block


class Packed:
    """See the module."""

    def __init__(self, packing: Packing, model: Any, *, compile: bool) -> None:
        """compile: whether `warm_up` compiles the layers, which takes tens of seconds."""
        self._packing, self._model = packing, model
        self._compiled: Block | None = None
        if compile:
            # Parameters keep their sizes, so all layers share the compiled code, and no other size is a constant.
            # Padding of shapes would make one: it compares the number of patches with the GPU's properties.
            options: dict[str, Any] = {"shape_padding": False}
            self._compiled = torch.compile(packing.block, dynamic=True, fullgraph=True, options=options)
        self._refused = 0

    def warmed_up(self) -> None:
        """End the processes of torch's compiler, after batches of all kinds. There are as many as cores, up to 32, and
        they would live as long as this process."""
        if self._compiled is not None:
            from torch._inductor import async_compile  # takes a third of a second, and torch.compile has imported it

            async_compile.shutdown_compile_workers()

    @property
    def refused(self) -> int:
        """Batches that went through uncompiled layers, because the compiled code does not take them."""
        return self._refused

    def warm_up(self, features: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> None:
        """Run the first batch of a kind: this loads kernels, and compiles the layers if `compile` is set."""
        self._packing.run(self._model, self._compiled or self._packing.block, features, batch)

    def __call__(self, features: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Pass`. It compiles nothing, because a request waits for the batch. A batch that would need it goes
        through uncompiled layers, and is counted and logged."""
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
