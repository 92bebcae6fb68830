"""FAKE, see `vllm/__init__.py`: the names and signatures of the real base, and what the connector inherits of it."""

from __future__ import annotations

import enum
from typing import Any


class ECConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class ECConnectorMetadata:
    pass


class ECConnectorBase:
    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        self._connector_metadata: ECConnectorMetadata | None = None
        self._role = role
        self._is_producer = vllm_config.ec_transfer_config.ec_role in ("ec_producer", "ec_both")
        self._is_consumer = vllm_config.ec_transfer_config.ec_role in ("ec_consumer", "ec_both")

    @property
    def is_producer(self) -> bool:
        return self._is_producer

    @property
    def is_consumer(self) -> bool:
        return self._is_consumer

    def shutdown(self) -> None: ...

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None: ...

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None: ...

    def has_cache_item(self, identifier: str) -> bool: ...

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool: ...

    def start_save_caches(self, **kwargs: Any) -> None: ...

    def take_unavailable_requests(self) -> set[str]: ...

    def update_state_after_free(self, request: Any, index: int) -> None: ...

    def update_state_after_alloc(self, request: Any, index: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata: ...

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]: ...
