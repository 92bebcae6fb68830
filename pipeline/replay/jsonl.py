"""The traces of one JSON object a line: our own, Mooncake's, and ServeGen's as its generator gives them."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorferry.pipeline.replay.request import (
    MAX_IMAGES,
    MAX_OUTPUT_TOKENS,
    MAX_PIXELS,
    MAX_SIDE,
    MAX_TOKENS,
    BrokenRow,
    Image,
    Request,
)
from tensorferry.pipeline.replay.values import NS, decimal, nanoseconds, whole

_decode = msgspec.json.Decoder(float_hook=decimal).decode
_MAX_ID_CHARACTERS = 256
_MAX_PATH_CHARACTERS = 4096


def json_object(line: str) -> dict[str, Any]:
    """The object on one line, numbers kept exact. Raises BrokenRow (not_json)."""
    try:
        value = _decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as problem:
        raise BrokenRow("not_json", f"not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise BrokenRow("not_json", f"a JSON {type(value).__name__}, not an object")
    return value


class Own:
    """tensorferry's own format, as docs/traces.md describes it. Unknown keys are refused: a misspelt one would
    be a request that was never recorded."""

    name = "tensorferry"
    wall = False
    first_line = 1
    KEYS = frozenset({"at_ms", "id", "text", "text_tokens", "context_tokens", "images", "output_tokens"})
    IMAGE_KEYS = frozenset({"path", "width", "height", "tokens"})

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        _refuse_unknown(row, self.KEYS, "")
        given = [key for key in ("text", "text_tokens", "context_tokens") if row.get(key) is not None]
        if len(given) > 1:
            raise BrokenRow("conflict", f"{' and '.join(given)}: only one of them can be sent")
        text = row.get("text")
        if text is not None and not isinstance(text, str):
            raise BrokenRow("bad_value", "text is not a string")
        if text is not None and len(text) > MAX_TOKENS:
            raise BrokenRow("out_of_range", f"text has {len(text)} characters; at most {MAX_TOKENS} can be sent")
        counted = next((key for key in given if key != "text"), None)
        tokens = whole(row[counted], counted, MAX_TOKENS) if counted else 0
        images = self._images(row.get("images", []))
        if not text and not tokens and not images:
            raise BrokenRow("empty", "neither text nor images")
        shared = counted == "context_tokens" and bool(images)
        if shared and any(image.path for image in images):
            raise BrokenRow("conflict", "context_tokens beside image files: give text_tokens, which needs no guess")
        return Request(
            line=number,
            at_ns=nanoseconds(row.get("at_ms"), "at_ms", NS // 1000),
            output_tokens=whole(row.get("output_tokens"), "output_tokens", MAX_OUTPUT_TOKENS),
            id=self._id(row.get("id", "")),
            text=text or None,
            text_tokens=None if shared else tokens or None,
            context_tokens=tokens if shared else None,
            images=images,
        )

    def _id(self, value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or len(value) > _MAX_ID_CHARACTERS:
            raise BrokenRow("bad_value", f"id is not a string of at most {_MAX_ID_CHARACTERS} characters")
        return value

    def _images(self, value: object) -> tuple[Image, ...]:
        if isinstance(value, list):
            if len(value) > MAX_IMAGES:
                raise BrokenRow("out_of_range", f"{len(value)} images; at most {MAX_IMAGES} can be sent")
            return tuple(self._image(image, f"images[{index}]") for index, image in enumerate(value))
        return (Image(),) * whole(value, "images", MAX_IMAGES)

    def _image(self, value: object, where: str) -> Image:
        if not isinstance(value, dict):
            raise BrokenRow("bad_value", f"{where} is not an object")
        _refuse_unknown(value, self.IMAGE_KEYS, f"{where}.")
        match sorted(value):
            case ["path"]:
                return Image(path=_local_path(value["path"], f"{where}.path"))
            case ["height", "width"]:
                width = whole(value["width"], f"{where}.width", MAX_SIDE, least=1)
                height = whole(value["height"], f"{where}.height", MAX_SIDE, least=1)
                if width * height > MAX_PIXELS:
                    raise BrokenRow("out_of_range", f"{where} has {width * height} pixels; at most {MAX_PIXELS}")
                return Image(width=width, height=height)
            case ["tokens"]:
                return Image(tokens=whole(value["tokens"], f"{where}.tokens", MAX_TOKENS, least=1))
        raise BrokenRow("conflict", f"{where} needs one of: path; width and height; tokens")


class Mooncake:
    """github.com/kvcache-ai/Mooncake: times in milliseconds, text only, an id for each 512 tokens of prompt.

    Its traces put up to 28 requests on one instant (a three-second tick); they are sent together.
    """

    name = "mooncake"
    wall = False
    first_line = 1
    BLOCK_TOKENS = 512

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        tokens = whole(row.get("input_length"), "input_length", MAX_TOKENS)
        if not tokens:
            raise BrokenRow("empty", "input_length is 0")
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise BrokenRow("bad_value", "hash_ids is not a list of integers")
        return Request(
            line=number,
            at_ns=nanoseconds(row.get("timestamp"), "timestamp", NS // 1000),
            output_tokens=whole(row.get("output_length"), "output_length", MAX_OUTPUT_TOKENS),
            text_tokens=tokens,
            blocks=tuple(blocks),
            block_tokens=self.BLOCK_TOKENS,
        )


class ServeGen:
    """Requests as github.com/alibaba/ServeGen's generator gives them, one JSON object each: times in seconds,
    and the tokens of every single image."""

    name = "servegen"
    wall = False
    first_line = 1

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        data = row.get("data")
        if not isinstance(data, dict):
            raise BrokenRow("missing" if data is None else "bad_value", "data is not an object")
        if data.get("audio_tokens") or data.get("video_tokens"):
            raise BrokenRow("unsupported_media", "audio or video, which replay cannot send")
        sizes = data.get("image_tokens", [])
        if not isinstance(sizes, list):
            raise BrokenRow("bad_value", "data.image_tokens is not a list")
        if len(sizes) > MAX_IMAGES:
            raise BrokenRow("out_of_range", f"{len(sizes)} images; at most {MAX_IMAGES} can be sent")
        images = tuple(Image(tokens=whole(size, "data.image_tokens[]", MAX_TOKENS, least=1)) for size in sizes)
        tokens = whole(data.get("text_tokens"), "data.text_tokens", MAX_TOKENS)
        if not tokens and not images:
            raise BrokenRow("empty", "neither text nor images")
        return Request(
            line=number,
            at_ns=nanoseconds(row.get("timestamp"), "timestamp", NS),
            output_tokens=whole(data.get("output_tokens"), "data.output_tokens", MAX_OUTPUT_TOKENS),
            id=str(row.get("request_id", ""))[:_MAX_ID_CHARACTERS],
            text_tokens=tokens or None,
            images=images,
        )


def _refuse_unknown(row: dict[str, Any], known: frozenset[str], where: str) -> None:
    for key in row:
        if key not in known:
            raise BrokenRow("unknown_key", f"unknown key {where}{key[:40]}; known are {', '.join(sorted(known))}")


def _local_path(value: object, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_PATH_CHARACTERS or "\0" in value:
        raise BrokenRow("bad_value", f"{name} is not a path")
    if "://" in value or value.startswith("data:"):
        raise BrokenRow("bad_value", f"{name} is {value[:40]!r}; replay sends local files only")
    return value
