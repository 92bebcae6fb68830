"""vLLM's interface of encoder caches, as of vLLM 0.32: which of its calls, in which thread, does what here.

vLLM makes one connector in its engine core, for the scheduler, and one in each worker. The two share no memory, and
nothing that they are called for may wait.

| vLLM calls                         | in                   | here                                         |
|------------------------------------|----------------------|----------------------------------------------|
| `save_caches`, `start_save_caches` | a producer's worker  | `Producer.put`, by the first rank            |
| `ensure_cache_available`           | the engine core      | `Switchboard.need`; False defers the request |
| `take_unavailable_requests`        | the engine core      | ends requests with an error                  |
| `has_cache_item`                   | the engine core      | held by all ranks, so it will load           |
| `update_state_after_alloc`         | the engine core      | it loads in this step                        |
| `build_connector_meta`             | the engine core      | `Step`, which travels with the step          |
| `start_load_caches`                | a consumer's workers | `Consumer.load`, then `Consumer.let_go`      |
| `update_state_after_free`          | the engine core      | the request's claim ends                     |
| `request_finished`                 | the engine core      | all of its claims end                        |
| `shutdown`                         | all                  | closes; after SIGKILL the peers find out     |

Source: vllm/distributed/ec_transfer/ec_connector/base.py and vllm/v1/core/sched/scheduler.py of 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver, collect_ec_item_metadata
from vllm.version import __version__ as vllm_version

from tensorferry.codecs.errors import DeploymentError, FerryError
from tensorferry.connectors.ec.consumer import Consumer
from tensorferry.connectors.ec.producer import Producer
from tensorferry.connectors.ec.settings import Settings
from tensorferry.connectors.ec.switchboard import Switchboard, scheduler_address
from tensorferry.connectors.vllm.identity import identity_of

log = structlog.get_logger()

VLLM = "0.32"  #: the minor version whose interface this is


@dataclass
class Step(ECConnectorMetadata):  # vLLM pickles it on the way to its workers
    """What the workers do in one step of the engine."""

    loads: list[str] = field(default_factory=list)
    let_go: list[tuple[str, int]] = field(default_factory=list)  #: items and their holdings, after the loads
    offers: list[str] = field(default_factory=list)  #: items of a producer's new requests


class TensorferryConnector(ECConnectorBase):
    """See the module; docs/engines.md has the configuration."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Raises DeploymentError for another vLLM, another role than ec_producer or ec_consumer, or bad settings."""
        super().__init__(vllm_config=vllm_config, role=role)
        _log_as_vllm_does()
        transfer, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
        if not vllm_version.startswith(f"{VLLM}."):
            raise DeploymentError(f"vLLM {vllm_version}: tensorferry.vllm_ec is made for {VLLM}; install that")
        if self.is_producer == self.is_consumer:
            raise DeploymentError(f"ec_role {transfer.ec_role!r}: give ec_producer or ec_consumer")
        self._settings = settings = Settings.of(transfer.ec_connector_extra_config)
        self._fields = PlaceholderMetadataResolver(vllm_config.model_config)
        model = identity_of(vllm_config.model_config, settings.model)
        ranks = parallel.world_size // parallel.pipeline_parallel_size
        engine = f"{transfer.engine_id}/{parallel.data_parallel_index}"
        self._board: Switchboard | None = None
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._local: set[tuple[str, str]] = set()  # (request, item) that the engine's own tower encodes
        if role is ECConnectorRole.SCHEDULER:
            if self.is_consumer:
                self._board = Switchboard(settings, engine, ranks)
        elif self.is_producer and parallel.rank == 0:  # all ranks of a producer have the same outputs
            self._producer = Producer(settings, model, device=_device(vllm_config))
        elif self.is_consumer and parallel.rank < ranks:  # of several pipeline stages the first has the embeddings
            address, device = scheduler_address(settings, engine), _device(vllm_config)
            self._consumer = Consumer(settings, model, address, rank=parallel.rank, ranks=ranks, device=device)

    def shutdown(self) -> None:
        for part in (self._board, self._producer, self._consumer):
            if part is not None:
                part.close()
        self._board = self._producer = self._consumer = None

    # --- workers

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_: Any) -> None:
        if self._producer is None:
            return
        try:
            self._producer.put(mm_hash, encoder_cache[mm_hash])
        except FerryError as problem:  # its readers run out of patience; the engine goes on
            log.error("ec_output_not_kept", item=mm_hash, problem=str(problem))

    def start_save_caches(self, **kwargs: Any) -> None:
        """An item that the engine has in its cache is not encoded again, and may have been forgotten here."""
        if self._producer is None:
            return
        cache = kwargs["encoder_cache"]
        for name in self._get_connector_metadata().offers:
            if name in cache and not self._producer.has(name):
                self.save_caches(cache, name)

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        step = self._get_connector_metadata()
        consumer.cache = encoder_cache
        for name in step.loads:
            encoder_cache[name] = consumer.load(name)
        for name, hold in step.let_go:
            consumer.let_go(name, hold)

    # --- the engine core

    def has_cache_item(self, identifier: str) -> bool:
        return self._board is not None and self._board.is_held(identifier)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        board, features = self._board, request.mm_features
        if board is None or not features or _end(features[-1]) <= num_computed_tokens:
            return True
        due = [feature for feature in features if _end(feature) > num_computed_tokens]
        if self._settings.on_missing == "encode":
            due = [feature for feature in due if not self._encodes_itself(request.request_id, feature)]
        return board.need(request.request_id, [(f.identifier, f.mm_position.get_num_embeds()) for f in due])

    def take_unavailable_requests(self) -> set[str]:
        if self._board is None:
            return set()
        unavailable = self._board.unavailable()
        for request, why in unavailable.items():
            log.error("ec_request_failed", request=request, reason=why)
        return set(unavailable)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._board is not None:
            self._board.allocated(request.mm_features[index].identifier)

    def update_state_after_free(self, request: Any, index: int) -> None:
        """The language model has computed the item's tokens. A request may have it in several places."""
        if self._board is None:
            return
        name = request.mm_features[index].identifier
        if name not in (feature.identifier for feature in request.mm_features[index + 1 :]):
            self._board.let_go(request.request_id, name)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        if self._board is not None:
            loads, let_go = self._board.step(scheduler_output.total_num_scheduled_tokens > 0)
            return Step(loads, let_go)
        new = scheduler_output.scheduled_new_reqs if self.is_producer else ()
        return Step(offers=list(dict.fromkeys(_names(new))))

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A producer's answer has what a consumer needs in place of the image: the item's name and its grid."""
        if self._board is not None:
            self._board.finished(request.request_id)
            self._local = {pair for pair in self._local if pair[0] != request.request_id}
        if not self.is_producer:
            return False, None
        return False, collect_ec_item_metadata(request.mm_features, self._fields) or None

    def _encodes_itself(self, request: str, feature: Any) -> bool:
        """Whether an item has been given up, and the request came with the image."""
        assert self._board is not None
        name = feature.identifier
        if (request, name) in self._local:
            return True
        if not self._board.missing(request, name) or feature.data is None:
            return False
        if set(feature.data) <= self._fields.fields_for(feature.modality):
            return False
        log.warning("ec_encodes_itself", request=request, item=name)
        self._board.let_go(request, name)
        self._local.add((request, name))
        return True


def _log_as_vllm_does() -> None:
    """Through Python's logging, as loggers `tensorferry.*`, where nobody has said otherwise: structlog's own default is
    to print to standard output, which is the engine's."""
    if not structlog.is_configured():
        structlog.configure(
            processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )


def _end(feature: Any) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)


def _names(requests: Iterable[Any]) -> Iterable[str]:
    return (feature.identifier for request in requests for feature in request.mm_features)


def _device(vllm_config: Any) -> int | None:
    """The worker's GPU, as torch counts; None: it computes on the host."""
    if vllm_config.device_config.device_type != "cuda":
        return None
    import torch

    return int(torch.cuda.current_device())
