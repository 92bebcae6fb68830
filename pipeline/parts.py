"""Deprecated path of `tensorferry.pipeline.client.prompt_parts`; gone in 0.2."""

import sys
import warnings

from tensorferry.pipeline.client import prompt_parts

NEW = "tensorferry.pipeline.client.prompt_parts"
warnings.warn(f"{__name__} is now {NEW}, and is gone in 0.2; import from tensorferry", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = prompt_parts
