"""Deprecated path of `tensorferry.pipeline.deployment.load`; gone in 0.2."""

import sys
import warnings

from tensorferry.pipeline.deployment import load

NEW = "tensorferry.pipeline.deployment.load"
warnings.warn(f"{__name__} is now {NEW}, and is gone in 0.2; import from tensorferry", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = load
