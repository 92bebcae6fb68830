"""Prompts as lists of text and images, as chat completion requests and datasets have them.

A deployment has no chat template, so messages become their contents, one after the other. A note says that there were
roles and tools.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tensorferry.pipeline.recording.request import MAX_IMAGES, MAX_TOKENS, BrokenRow, Image
from tensorferry.replay.trace.formats.media import image_at

_MEDIA = ("audio", "video", "input_audio", "audio_url", "video_url", "file")


class Prompt(msgspec.Struct, frozen=True):
    """The content of a request."""

    layout: tuple[str | int, ...]  #: text, and indices into `images`
    images: tuple[Image, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[str | Image], notes: tuple[str, ...] = ()) -> Prompt:
        """Make a prompt of its parts. Raises BrokenRow: empty, out_of_range."""
        layout: list[str | int] = []
        images: list[Image] = []
        characters = 0
        for part in parts:
            if isinstance(part, Image):
                layout.append(len(images))
                images.append(part)
            elif part:
                layout.append(part)
                characters += len(part)
        if not layout:
            raise BrokenRow("empty", "it has neither text nor images")
        if len(images) > MAX_IMAGES:
            raise BrokenRow("out_of_range", f"it has {len(images)} images; at most {MAX_IMAGES} can be sent")
        if characters > MAX_TOKENS:
            raise BrokenRow("out_of_range", f"it has {characters} characters of text; at most {MAX_TOKENS} can be sent")
        return cls(tuple(layout), tuple(images), notes)

    @classmethod
    def of_messages(cls, messages: object, *, bare_paths: bool = False) -> Prompt:
        """Read the messages of a chat completion request. Raises BrokenRow."""
        if not isinstance(messages, list):
            raise BrokenRow("bad_value", "messages is not a list")
        parts: list[str | Image] = []
        for index, message in enumerate(messages):
            if not isinstance(message, dict):
                raise BrokenRow("bad_value", f"messages[{index}] is not an object")
            parts += content(message.get("content"), f"messages[{index}].content", bare_paths=bare_paths)
        return cls.of(parts, ("roles_not_sent",))

    @classmethod
    def of_body(cls, body: dict[str, Any]) -> Prompt:
        """Read `messages` or `prompt` in the body of a completion request. Raises BrokenRow."""
        if "messages" in body:
            prompt = cls.of_messages(body["messages"])
        elif isinstance(body.get("prompt"), str):
            prompt = cls.of([body["prompt"]])
        else:
            raise BrokenRow("missing", "the body has neither messages nor a prompt of text")
        return msgspec.structs.replace(prompt, notes=(*prompt.notes, "tools_not_sent")) if body.get("tools") else prompt


def content(value: object, name: str, *, bare_paths: bool) -> list[str | Image]:
    """Read text, or a list of parts: `{"type": "text"}`, `{"type": "image"}`, `{"type": "image_url"}`.

    Raises BrokenRow.
    """
    if value is None:  # as in an assistant's call of a tool
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise BrokenRow("bad_value", f"{name} is neither text nor a list")
    return [_part(part, f"{name}[{index}]", bare_paths) for index, part in enumerate(value)]


def _part(part: object, name: str, bare_paths: bool) -> str | Image:
    if not isinstance(part, dict):
        raise BrokenRow("bad_value", f"{name} is not an object")
    match part.get("type"):
        case "text" | "input_text":
            text = part.get("text")
            if not isinstance(text, str):
                raise BrokenRow("bad_value", f"{name}.text is not a string")
            return text
        case "image":
            return image_at(part.get("image"), f"{name}.image", bare_paths=bare_paths)
        case "image_url" | "input_image":
            url = part.get("image_url")
            return image_at(
                url.get("url") if isinstance(url, dict) else url, f"{name}.image_url", bare_paths=bare_paths
            )
        case kind if kind in _MEDIA:
            raise BrokenRow("unsupported_media", f"{name} is {kind}, which replay cannot send")
        case kind:
            raise BrokenRow("bad_value", f"{name} has the type {str(kind)[:40]!r}")
