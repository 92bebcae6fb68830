"""The libtiff that Pillow has loaded: it would write a line to stderr for each fault of a file."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from PIL import _imaging


def silence_libtiff() -> None:
    """Take away libtiff's error handlers, in this whole process. Decoding fails as before, and Pillow raises.

    Pillow removes the handlers of warnings only. The handlers' lines come from the JPEG library inside libtiff as well.
    Source: libtiff, TIFFSetErrorHandler(3): with NULL no message is written.
    """
    # A Pillow without libtiff, or with one that shows none of its functions, keeps its lines.
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(_imaging.__file__)  # its symbols are found, and those of the libraries that it has loaded
        for name in ("TIFFSetErrorHandler", "TIFFSetErrorHandlerExt"):
            set_handler = getattr(library, name)
            set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
            set_handler(None)
