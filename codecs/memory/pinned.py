"""Page-locked host memory: what a GPU copies at full speed, and without the host waiting.

torch keeps such memory for its next use, and does not give it out before the copies it has queued on it are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def pinned(nbytes: int) -> torch.Tensor:
    """uint8 of shape (nbytes,), its bytes not set. Making new memory takes milliseconds, using it again does not."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def pinned_copy(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    copy = pinned(data.nbytes)
    np.copyto(copy.numpy(), data)
    return copy
