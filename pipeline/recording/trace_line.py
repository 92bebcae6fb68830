"""A request as a line of a trace in our own format, which `replay` reads as the same one."""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import msgspec

from tensorferry.pipeline.recording.request import Image, Request

_MS_NS = 1_000_000
_encode = msgspec.json.Encoder(decimal_format="number").encode


def line_of(request: Request, at_ns: int) -> bytes:
    """The request as a line that `Own` reads as the same one, at another time; `notes` are not kept."""
    row: dict[str, Any] = {"at_ms": _ms(at_ns)}
    for key in ("id", "session", "parent"):
        if value := getattr(request, key):
            row[key] = value
    for key in ("text", "text_tokens", "context_tokens"):
        if (value := getattr(request, key)) is not None:
            row[key] = value
    images = [_image_row(image) for image in request.images]
    if request.layout:
        row["parts"] = [part if isinstance(part, str) else images[part] for part in request.layout]
    elif images:
        row["images"] = images if any(images) else len(images)
    row["output_tokens"] = request.output_tokens
    if request.blocks:
        row["blocks"], row["block_tokens"] = request.blocks, request.block_tokens
    if request.continues:
        row["continues"] = True
    for key, duration_ns in (("think_ms", request.think_ns), ("took_ms", request.took_ns)):
        if duration_ns is not None:
            row[key] = _ms(duration_ns)
    return _encode(row) + b"\n"


def _ms(ns: int) -> int | Decimal:
    """Exactly: a float of an epoch time in milliseconds has steps of 244 nanoseconds."""
    whole_ms, rest = divmod(ns, _MS_NS)
    return Decimal(f"{whole_ms}.{rest:06}".rstrip("0")) if rest else whole_ms


def _image_row(image: Image) -> dict[str, Any]:
    if image.data:
        return {"data": base64.b64encode(image.data).decode()}
    if image.path:
        return {"path": image.path}
    if image.tokens:
        return {"tokens": image.tokens}
    return {"width": image.width, "height": image.height} if image.width else {}
