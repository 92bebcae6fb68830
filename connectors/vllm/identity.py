"""Whose outputs an engine makes and reads: two engines hand them over only if this is the same of both."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from tensorferry.connectors.ec.messages import Model

#: What differs between copies of one checkpoint, or is in `Model` already.
VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"})


def identity_of(model_config: Any, name: str) -> Model:
    """Of vLLM's ModelConfig. name: what the model is called to peers; empty: as vLLM was told to load it.

    The digest is of the checkpoint's configuration, which says the shapes of the encoder and what it is made of. Two
    sets of weights under one name and one configuration cannot be told apart: give them names of their own.
    """
    text = msgspec.json.encode(_steady(model_config.hf_config.to_dict()), order="deterministic", enc_hook=str)
    return Model(
        name=name or str(model_config.model),
        digest=blake2b(text, digest_size=16).hexdigest(),
        dtype=str(model_config.dtype).removeprefix("torch."),
        width=int(model_config.get_hidden_size()),
    )


def _steady(value: Any) -> Any:
    """A configuration without what may differ between two copies, its keys text."""
    if isinstance(value, dict):
        return {str(key): _steady(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [_steady(inner) for inner in value]
    return value
