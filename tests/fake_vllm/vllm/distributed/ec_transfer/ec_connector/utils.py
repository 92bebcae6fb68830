"""FAKE, see `vllm/__init__.py`: a model whose placeholders are sized by `image_grid_thw`."""

from __future__ import annotations

from typing import Any


class PlaceholderMetadataResolver:
    def __init__(self, model_config: Any) -> None: ...

    def fields_for(self, modality: str) -> set[str]:
        return {"image_grid_thw"}


def collect_ec_item_metadata(mm_features: Any, resolver: PlaceholderMetadataResolver) -> dict[str, dict[str, Any]]:
    return {feature.identifier: {"metadata": {}} for feature in mm_features}
