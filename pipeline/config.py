"""Deprecated path of `load` and `spec` in `tensorferry.pipeline.deployment`; gone in 0.2."""

import warnings

from tensorferry.pipeline.deployment import spec
from tensorferry.pipeline.deployment.load import Check as Check
from tensorferry.pipeline.deployment.load import load as load
from tensorferry.pipeline.deployment.load import placed as placed
from tensorferry.pipeline.deployment.load import require_available as require_available
from tensorferry.pipeline.deployment.load import resolved as resolved

NEW = "tensorferry.pipeline.deployment"
warnings.warn(f"{__name__} is now {NEW}, and is gone in 0.2; import from tensorferry", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> object:
    return getattr(spec, name)
