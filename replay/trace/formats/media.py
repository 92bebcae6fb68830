"""References to images in requests. Only images in the request or on this machine are read: a replay fetches nothing,
so that it depends on no other server."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote, urlsplit

from tensorferry.pipeline.client.data_url import is_data_url, read_data_url
from tensorferry.pipeline.recording.request import BrokenRow, Image

_MAX_PATH_CHARACTERS = 4096
_SHOWN = 40


def image_at(reference: object, name: str, *, bare_paths: bool = True) -> Image:
    """Read an image reference: a `data:` URI, a `file:` URL or (bare_paths) a path.

    Raises BrokenRow: remote_image for an image on a server, bad_value for any other value.
    """
    if not isinstance(reference, str) or not reference:
        raise BrokenRow("bad_value", f"{name} is not a reference to an image")
    if is_data_url(reference):
        try:
            return Image(data=read_data_url(reference))
        except ValueError as problem:
            raise BrokenRow("bad_value", f"{name} is {reference[:_SHOWN]!r}: {problem}") from None
    if reference[:5].casefold() == "file:":
        try:
            parts = urlsplit(reference)
            path = unquote(parts.path, errors="strict")
        except ValueError as problem:  # an invalid host, or bytes that are not UTF-8
            raise BrokenRow("bad_value", f"{name} is {reference[:_SHOWN]!r}, not a file: URL: {problem}") from None
        if parts.netloc not in ("", "localhost"):
            raise BrokenRow("remote_image", f"{name} is {reference[:_SHOWN]!r}, on another machine")
        return Image(path=local_path(path, name))
    if "://" in reference:
        raise BrokenRow("remote_image", f"{name} is {reference[:_SHOWN]!r}; replay sends data: and file: only")
    if not bare_paths:
        raise BrokenRow("bad_value", f"{name} is {reference[:_SHOWN]!r}, neither a data: nor a file: URL")
    return Image(path=local_path(reference, name))


def local_path(value: object, name: str) -> str:
    """Check a path in a trace. Raises BrokenRow (bad_value)."""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_PATH_CHARACTERS or "\0" in value:
        raise BrokenRow("bad_value", f"{name} is not a path")
    if "://" in value or is_data_url(value):
        raise BrokenRow("bad_value", f"{name} is {value[:_SHOWN]!r}; a path names a local file")
    return value


def decoded(value: object, name: str) -> bytes:
    """Decode base64. Raises BrokenRow (bad_value)."""
    try:
        if not isinstance(value, str):
            raise ValueError("not a string")
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as problem:
        raise BrokenRow("bad_value", f"{name} is not base64: {problem}") from None
    if not data:
        raise BrokenRow("bad_value", f"{name} is empty")
    return data
