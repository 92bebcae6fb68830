"""What a pool and a consumer give each other, beside descriptors, when the consumer attaches."""

from __future__ import annotations

from tensorferry.codecs.memory.cuda_driver import HandleKind
from tensorferry.codecs.memory.memory import GpuHandle
from tensorferry.codecs.messages import Nonce, PoolDescription, Wire


class Export(Wire, frozen=True):
    """What a consumer is given of a pool, beside the descriptors of its memory, control page and process."""

    description: PoolDescription
    producer: Nonce
    gpu: GpuHandle | None = None  #: instead of a descriptor of the memory
    #: Of an elastic pool that shares no pages and is acknowledged by message: how its chunks are handed over.
    mail: HandleKind | None = None


class Attachment(Wire, frozen=True):
    """What a consumer gives back, beside the descriptors of its ack page and process."""

    pool: Nonce
    consumer: Nonce


def positions_of(description: PoolDescription) -> int:
    """How many chunks a pool can have; 0: its memory does not come in chunks."""
    return description.nbytes // description.chunk_nbytes if description.chunk_nbytes else 0
