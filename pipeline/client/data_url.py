"""`data:` URLs (RFC 2397)."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

_BASE64 = re.compile(r";\s*base64\s*$", re.IGNORECASE)
_SPACE = re.compile(rb"[ \t\r\n\f]+")


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def read_data_url(url: str) -> bytes:
    """Return the bytes of a `data:` URL. Its media type is ignored, because the bytes say what a file is.

    It is read as browsers read it (WHATWG, *data: URL processor*): `;base64` in any case and with spaces around it,
    other parameters before it ignored, percent-encoding undone first; base64 may contain white space and lack its
    padding. Raises ValueError: no comma, no base64, or no bytes.
    """
    head, comma, body = url[len("data:") :].partition(",")
    if not comma:
        raise ValueError("a data: URL has no comma before its data")
    data = unquote_to_bytes(body)
    if _BASE64.search(head):
        data = _SPACE.sub(b"", data)
        try:
            data = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
        except binascii.Error as problem:
            url_safe = "; write + and / instead of - and _" if b"-" in data or b"_" in data else ""
            raise ValueError(f"the data of a data: URL are not base64: {problem}{url_safe}") from None
    if not data:
        raise ValueError("a data: URL has no data")
    return data
