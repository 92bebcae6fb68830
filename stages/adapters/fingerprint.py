"""An encoder for tests: its embeddings are a digest of the bytes of an item.

With it a test proves, end to end, that every item arrived bit-equal at its place. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tensorferry.codecs.tensors import view_of
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out, split
from tensorferry.stages.adapters.options import FingerprintOptions
from tensorferry.stages.plugin import read_options

DIGEST_NBYTES = 32


def fingerprint_of(data: bytes | memoryview, dtype: str, shape: Sequence[int]) -> bytes:
    """The 32-byte BLAKE2b of a tensor: of `dtype extent,extent,..` and a newline in ASCII, then its bytes.

    data: the tensor's bytes, contiguous. Tensors of equal bytes and another dtype or shape have another digest.
    """
    digest = blake2b(f"{dtype} {','.join(map(str, shape))}\n".encode("ascii"), digest_size=DIGEST_NBYTES)
    digest.update(data)
    return digest.digest()


class Fingerprint:
    """Outputs of an item: `embeddings`, uint8 (rows, 32), every row the item's fingerprint; and `digest`,
    uint8 (32,), the fingerprint again, so that items travel with more than one output."""

    supports_cuda_vmm_feature_transport: bool = True

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """Read the options. threads: not used; hashing takes one core. Raises ConfigError for unknown options."""
        self._options = read_options("model.options", "fingerprint", FingerprintOptions, spec.options)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        batches = [[item] for item in items] if self._options.load_each else [items]
        for batch in filter(None, batches):
            features = load([item.index for item in batch])
            for item, view in zip(batch, split(features, batch), strict=True):
                digest = np.frombuffer(fingerprint_of(view.host().data.data, view.dtype, view.shape), np.uint8)
                rows = np.broadcast_to(digest, (item.rows, DIGEST_NBYTES))
                out(item.index, "embeddings", rows.shape, "uint8").copy_from(view_of(rows))
                out(item.index, "digest", digest.shape, "uint8").copy_from(view_of(digest))
