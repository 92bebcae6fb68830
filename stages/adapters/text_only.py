"""The adapter for a model that takes only text: requests skip the encoder, and a request with an image is refused."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.codecs.errors import BadItem
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.options import TextOnlyOptions
from tensorferry.stages.plugin import read_options


class TextOnly:
    """An adapter that encodes nothing. Its deployment reserves no pool."""

    supports_cuda_vmm_feature_transport: bool = False

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """threads: not used. Raises ConfigError for any option, since there are none."""
        read_options("model.options", "text-only", TextOnlyOptions, spec.options)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        for item in items:
            raise BadItem(item.index, f"this deployment's model takes no {item.modality}, only text")
