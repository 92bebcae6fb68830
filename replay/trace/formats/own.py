"""The reader of tensorferry's own format, which docs/traces.md describes. `trace_line` writes it."""

from __future__ import annotations

from tensorferry.pipeline.recording.request import (
    MAX_IMAGES,
    MAX_OUTPUT_TOKENS,
    MAX_PIXELS,
    MAX_SIDE,
    MAX_TOKENS,
    BrokenRow,
    Image,
    Request,
)
from tensorferry.replay.trace.exact_numbers import NS, nanoseconds, whole
from tensorferry.replay.trace.formats.json_lines import identity, json_object, list_of_integers, refuse_unknown
from tensorferry.replay.trace.formats.media import decoded, local_path
from tensorferry.replay.trace.formats.times import JsonRows

KEYS = frozenset(
    "at_ms id text text_tokens context_tokens images parts output_tokens blocks block_tokens session parent continues "
    "think_ms took_ms".split()
)
IMAGE_KEYS = frozenset({"path", "data", "width", "height", "tokens"})
_MS_NS = NS // 1000


class Own(JsonRows):
    """Rows of the format. Unknown keys are refused, since a misspelt key would change the request."""

    name = "tensorferry"

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        refuse_unknown(row, KEYS if self._times is None else KEYS | {self._times.field})
        given = [key for key in ("text", "text_tokens", "context_tokens", "parts") if row.get(key) is not None]
        if len(given) > 1:
            raise BrokenRow("conflict", f"it has {' and '.join(given)}; only one of them can be sent")
        if given == ["parts"] and row.get("images") is not None:
            raise BrokenRow("conflict", "it has parts and images; put the images among the parts")
        text = row.get("text")
        if text is not None and not isinstance(text, str):
            raise BrokenRow("bad_value", "text is not a string")
        if text is not None and len(text) > MAX_TOKENS:
            raise BrokenRow("out_of_range", f"text has {len(text)} characters; at most {MAX_TOKENS} can be sent")
        counted = next((key for key in given if key.endswith("tokens")), None)
        tokens = whole(row[counted], counted, MAX_TOKENS) if counted else 0
        layout, images = _parts(row["parts"]) if given == ["parts"] else ((), _images(row.get("images", [])))
        if not text and not tokens and not images and not layout:
            raise BrokenRow("empty", "it has neither text nor images")
        shared = counted == "context_tokens" and bool(images)
        if shared and any(image.recorded for image in images):
            raise BrokenRow("conflict", "it has context_tokens and image files; give text_tokens, which needs no guess")
        blocks = list_of_integers(row.get("blocks") or [], "blocks")
        return Request(
            line=number,
            at_ns=self._at_ns(row),
            output_tokens=whole(row.get("output_tokens"), "output_tokens", MAX_OUTPUT_TOKENS),
            id=identity(row.get("id", ""), "id"),
            text=text or None,
            text_tokens=None if shared else tokens or None,
            context_tokens=tokens if shared else None,
            images=images,
            blocks=blocks,
            block_tokens=whole(row.get("block_tokens"), "block_tokens", MAX_TOKENS, least=1) if blocks else 0,
            layout=layout,
            session=identity(row.get("session"), "session"),
            parent=identity(row.get("parent"), "parent"),
            continues=_truth(row.get("continues"), "continues"),
            think_ns=_duration(row.get("think_ms"), "think_ms"),
            took_ns=_duration(row.get("took_ms"), "took_ms"),
        )


def _images(value: object) -> tuple[Image, ...]:
    if isinstance(value, list):
        if len(value) > MAX_IMAGES:
            raise BrokenRow("out_of_range", f"it has {len(value)} images; at most {MAX_IMAGES} can be sent")
        return tuple(_image(image, f"images[{index}]") for index, image in enumerate(value))
    if isinstance(value, dict | str):
        raise BrokenRow("not_a_number", f"images is {str(value)[:40]!r}; give a list of images, or how many there are")
    return (Image(),) * whole(value, "images", MAX_IMAGES)


def _parts(value: object) -> tuple[tuple[str | int, ...], tuple[Image, ...]]:
    """Read text and images in the order in which they are sent."""
    if not isinstance(value, list):
        raise BrokenRow("bad_value", "parts is not a list")
    layout: list[str | int] = []
    images: list[Image] = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            layout.append(part)
        else:
            layout.append(len(images))
            images.append(_image(part, f"parts[{index}]"))
    if len(images) > MAX_IMAGES:
        raise BrokenRow("out_of_range", f"it has {len(images)} images; at most {MAX_IMAGES} can be sent")
    return tuple(layout), tuple(images)


def _image(value: object, where: str) -> Image:
    if not isinstance(value, dict):
        raise BrokenRow("bad_value", f"{where} is not an object")
    refuse_unknown(value, IMAGE_KEYS, f"{where}.")
    match sorted(value):
        case ["path"]:
            return Image(path=local_path(value["path"], f"{where}.path"))
        case ["data"]:
            return Image(data=decoded(value["data"], f"{where}.data"))
        case ["height", "width"]:
            width = whole(value["width"], f"{where}.width", MAX_SIDE, least=1)
            height = whole(value["height"], f"{where}.height", MAX_SIDE, least=1)
            if width * height > MAX_PIXELS:
                raise BrokenRow("out_of_range", f"{where} has {width * height} pixels; at most {MAX_PIXELS}")
            return Image(width=width, height=height)
        case ["tokens"]:
            return Image(tokens=whole(value["tokens"], f"{where}.tokens", MAX_TOKENS, least=1))
    raise BrokenRow("conflict", f"{where} needs one of: path; data; width and height; tokens")


def _truth(value: object, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise BrokenRow("bad_value", f"{name} is neither true nor false")
    return bool(value)


def _duration(value: object, name: str) -> int | None:
    return None if value is None else nanoseconds(value, name, _MS_NS)
