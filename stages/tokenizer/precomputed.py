"""Items whose embeddings came with the request: they go to the schedulers without an encoder (E3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.pool.publisher import Layout
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client.prompt_parts import MODALITIES
from tensorferry.stages.adapters.embedding_form import Form
from tensorferry.stages.processors.base import BadMedia, Plan

#: The grid of an item without patches, which has no owner among the encoder ranks.
NO_GRID = (0, 0, 0)
NO_HASH = bytes(32)  #: the content hash of such an item
#: The exponent bits of each float, and the integer type to read them with. If all are set, it is NaN or infinity.
_EXPONENTS = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F80_0000),
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
}


@dataclass(frozen=True, slots=True)
class Precomputed:
    """An item's outputs by name, over the bytes of the message they came in; `embeddings`, (rows, width), first."""

    modality: str
    outputs: Mapping[str, View]
    grid: tuple[int, int, int] = NO_GRID  #: of the patches that its embeddings were made from, if its client said so

    @property
    def plan(self) -> Plan:
        """The plan of this item; `shape` and `dtype` are those of its embeddings."""
        rows = next(iter(self.outputs.values()))
        return Plan(self.modality, NO_GRID, rows.shape, rows.dtype, rows.shape[0])

    @property
    def layout(self) -> Layout:
        return [(view.dtype, view.shape) for view in self.outputs.values()]

    def write(self, into: Sequence[View]) -> None:
        """Copy all outputs, in order. Raises BadMedia where one is not finite throughout."""
        for (name, view), target in zip(self.outputs.items(), into, strict=True):
            if not _is_finite(view):
                raise BadMedia(f"its {name} hold NaN or infinity")
            target.copy_from(view)


def read_precomputed(part: wire.EmbeddingsPart, frames: Sequence[Buffer], form: Form | None) -> Precomputed:
    """The embeddings of a part of a message. Nothing is copied.

    form: of what the deployment's model makes; None: unknown, so the engine has to check.
    Raises BadMedia for a malformed part, and for one that does not match the form.
    """
    if part.modality not in MODALITIES:
        raise BadMedia(f"embeddings of modality {part.modality!r}; {' and '.join(MODALITIES)} have placeholders")
    outputs: dict[str, View] = {}
    for output in part.outputs:
        if output.name in outputs:
            raise BadMedia(f"its output {output.name!r} comes twice")
        if isinstance(output.payload, wire.Proxy):
            raise BadMedia(f"its output {output.name!r} is a proxy; a client sends its tensors inline")
        try:
            outputs[output.name] = open_inline(output.payload, frames)
        except FerryError as problem:
            raise BadMedia(f"its output {output.name!r}: {problem}") from problem
    name, rows = next(iter(outputs.items()))
    if name != "embeddings":
        raise BadMedia(f"its first output is {name!r}; `embeddings` come first")
    found = f"its embeddings are {rows.dtype} {rows.shape}"
    if len(rows.shape) != 2 or not rows.shape[0]:
        raise BadMedia(f"{found}; (rows, width) is needed, one row or more")
    if form is not None:
        if (rows.dtype, rows.shape[1]) != (form.dtype, form.width):
            raise BadMedia(f"{found}; the deployment's model makes {form.dtype} of width {form.width}")
        for name, other in list(outputs.items())[1:]:
            _check_other(name, other, rows.shape[0], form)
    return Precomputed(part.modality, outputs, part.grid)


def _check_other(name: str, given: View, rows: int, form: Form) -> None:
    """Raise BadMedia unless the model makes this output beside `embeddings`, with this dtype and shape."""
    if name not in form.others:
        known = " and ".join(["embeddings", *form.others])
        raise BadMedia(f"the deployment's model makes no output {name!r}; it makes {known}; leave this output out")
    shape = tuple(rows if extent is None else extent for extent in form.others[name])
    if (given.dtype, given.shape) != (form.dtype, shape):
        made = f"for {rows} rows the deployment's model makes {form.dtype} {shape}"
        raise BadMedia(f"its {name} is {given.dtype} {given.shape}; {made}")


def _is_finite(view: View) -> bool:
    if view.dtype not in _EXPONENTS:
        return True
    integer, exponent = _EXPONENTS[view.dtype]
    bits = view.data.view(integer) & integer(exponent)
    return not (bits == exponent).any()
