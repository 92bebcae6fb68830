"""Plans a submitted request: its tokens, placeholders and the shape of every tensor, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadRequest, text_of
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.pool.publisher import Layout
from tensorferry.codecs.tensors import nbytes_of
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.adapters.embedding_form import Form
from tensorferry.stages.processors.base import AnimatedFile, BadMedia, Clip, Media, Plan, Processor, plan
from tensorferry.stages.tokenizer.precomputed import Precomputed, read_precomputed
from tensorferry.stages.tokenizer.text import Rows, TextEncoder

MediaPart = wire.ImagePart | wire.VideoPart | wire.AnimationPart
_UNKNOWN = {
    wire.AudioPart: "a sound",
    wire.VideoFilePart: "a video file (send its pictures, or an animated GIF, PNG or WebP)",
    wire.ImageRef: "a reference to an image that was seen before (send its bytes)",
}
Source = Media | Precomputed  #: an item's encoded media, or its ready embeddings


@dataclass(frozen=True, slots=True)
class Prompt:
    """The planned tokens and items of a request."""

    token_ids: npt.NDArray[np.int32]
    spans: Sequence[tuple[int, int]]
    sources: Sequence[Source]
    plans: Sequence[Plan]
    text_tokens: int  #: without those of the items

    @property
    def precomputed(self) -> dict[int, Precomputed]:
        """The items that need no encoder, by index."""
        return {index: source for index, source in enumerate(self.sources) if isinstance(source, Precomputed)}

    def to_encode(self, items: Iterable[int]) -> list[int]:
        """Which of these items an encoder must encode."""
        return [index for index in items if not isinstance(self.sources[index], Precomputed)]

    def grid(self, item: int) -> tuple[int, int, int]:
        """Of the patches that an item's embeddings are, or were, made from; (0, 0, 0): not known."""
        source = self.sources[item]
        return source.grid if isinstance(source, Precomputed) else self.plans[item].grid

    @property
    def layouts(self) -> list[Layout]:
        """The tensors that are sent for every item."""
        return [
            source.layout if isinstance(source, Precomputed) else [(plan.dtype, plan.shape)]
            for source, plan in zip(self.sources, self.plans, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(nbytes_of(dtype, shape) for layout in self.layouts for dtype, shape in layout)


class Planner:
    """Plans requests; thread-safe, and decodes no pixel."""

    def __init__(self, processor: Processor, text: TextEncoder, limits: LimitsSpec, form: Form | None = None) -> None:
        """form: of the embeddings that the deployment's model makes; None: unknown."""
        self._processor, self._text, self._limits, self._form = processor, text, limits, form

    def plan(self, submit: wire.Submit, frames: Sequence[Buffer]) -> Prompt:
        """Plan a request from headers alone. Raises BadRequest, and BadItem that names the item."""
        parts: list[npt.NDArray[np.int32] | Rows] = []
        sources: list[Source] = []
        plans: list[Plan] = []
        for part in submit.parts:
            match part:
                case wire.TextPart(text=text):
                    parts.append(self._text.encode(text))
                case wire.TokensPart(ids=ids):
                    parts.append(self._text.read_ids(ids))
                case _:
                    index = len(plans)
                    if index >= self._limits.request_items:
                        raise BadRequest(f"more than {self._limits.request_items} items (limits.request_items)")
                    try:
                        source, planned = self._item(part, frames)
                    except BadMedia as problem:
                        raise BadItem(index, text_of(problem)) from None
                    sources.append(source)
                    plans.append(planned)
                    parts.append(Rows(planned.rows, planned.modality))
        token_ids, spans = self._text.assemble(parts)
        if len(token_ids) > self._limits.request_tokens:
            raise BadRequest(f"{len(token_ids)} tokens; limits.request_tokens is {self._limits.request_tokens}")
        text_tokens = sum(len(part) for part in parts if not isinstance(part, Rows))
        prompt = Prompt(token_ids, spans, sources, plans, text_tokens)
        if prompt.nbytes > self._limits.request_mb << 20:
            raise BadRequest(f"tensors of {prompt.nbytes >> 20} MiB; limits.request_mb is {self._limits.request_mb}")
        return prompt

    def _item(self, part: wire.Part, frames: Sequence[Buffer]) -> tuple[Source, Plan]:
        """The source and the plan of an item. Raises BadMedia."""
        if not isinstance(part, MediaPart | wire.EmbeddingsPart):
            raise BadMedia(f"{_UNKNOWN[type(part)]}, which this deployment does not take")
        if isinstance(part, wire.EmbeddingsPart):
            ready = read_precomputed(part, frames, self._form)
            return ready, ready.plan
        media = self._media(part, frames)
        return media, plan(self._processor, media)

    def _media(self, part: MediaPart, frames: Sequence[Buffer]) -> Media:
        """The bytes of an item. Raises BadMedia if they are missing or too many."""
        first, count = (part.first, part.count) if isinstance(part, wire.VideoPart) else (part.frame, 1)
        if first + count > len(frames):
            raise BadMedia(f"its bytes should be frame {first + count - 1}, but the message has {len(frames)}")
        nbytes = sum(len(frame) for frame in frames[first : first + count])
        if nbytes > self._limits.item_mb << 20:
            raise BadMedia(f"{nbytes} encoded bytes; limits.item_mb is {self._limits.item_mb}")
        match part:
            case wire.VideoPart():
                return Clip(frames[first : first + count], part.rate[0] / part.rate[1] or None)
            case wire.AnimationPart():
                return AnimatedFile(frames[first])
        image: bytes | memoryview = frames[first]
        return image
