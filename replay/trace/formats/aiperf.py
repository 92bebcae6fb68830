"""AIPerf's formats (ai-dynamo/aiperf 0.13.0): single_turn, multi_turn, and the literal rows of mooncake_trace.

Times are milliseconds. A later turn may instead have a `delay` after the turn before. With neither it is sent as soon
as the turn before is answered. A row with a session is the new turn alone: AIPerf puts the conversation so far in front
of it, and so does a replay. Relative paths start at the folder of the file; AIPerf's start at its own current folder.
"""

from __future__ import annotations

from typing import Any

from tensorferry.pipeline.recording.request import MAX_TOKENS, BrokenRow, Drop, Image, Request
from tensorferry.replay.trace.exact_numbers import NS, nanoseconds, whole
from tensorferry.replay.trace.formats.chat import Prompt
from tensorferry.replay.trace.formats.json_lines import (
    identity,
    json_object,
    list_of_integers,
    object_at,
    output_tokens,
)
from tensorferry.replay.trace.formats.media import image_at
from tensorferry.replay.trace.formats.times import JsonRows, Times
from tensorferry.replay.trace.formats.token_counts import Keys, LengthRows

_MS_NS = NS // 1000
_OTHER_MEDIA = ("audio", "audios", "video", "videos")
_LITERAL = ("input_length", "text_input", "messages", "payload")


class Turns:
    """The times and images of earlier turns, which later rows refer to."""

    def __init__(self, times: Times | None) -> None:
        self._times = times
        self._last_ns: dict[str, int] = {}  #: by session
        self._images: dict[str, Image] = {}  #: by uuid

    def at_ns(self, row: dict[str, Any], session: str) -> tuple[int, int | None]:
        """Return the due time of a turn, and its delay after the end of the turn before. Raises BrokenRow."""
        times, delay = self._times, row.get("delay")
        says = times is not None and times.value(row) is not None
        if times is not None and says and delay is not None:
            raise BrokenRow("conflict", f"a turn has both {times.field} and delay; give one of them")
        last_ns = self._last_ns.get(session) if session else None
        if delay is not None:
            if last_ns is None:
                raise BrokenRow("missing", "the turn has a delay, but no turn before it")
            think_ns = nanoseconds(delay, "delay", _MS_NS)
            at_ns = last_ns + think_ns
        elif times is None:
            think_ns, at_ns = None, last_ns or 0
        elif last_ns is not None and not says:
            think_ns, at_ns = 0, last_ns  # as soon as the turn before is answered
        else:
            think_ns, at_ns = None, times.at_ns(row)
        if session:
            self._last_ns[session] = at_ns
        return at_ns, think_ns

    def images(self, row: dict[str, Any]) -> tuple[Image, ...]:
        """Return the images of a turn. A uuid without an image refers to an earlier image with it. Raises BrokenRow."""
        if row.get("image") is not None and row.get("images") is not None:
            raise BrokenRow("conflict", "a turn has both image and images; give one of them")
        given = [row["image"]] if row.get("image") is not None else _contents(row.get("images"), "images")
        images = tuple(image_at(reference, f"images[{index}]") for index, reference in enumerate(given))
        uuids = row.get("image_uuids") or []
        if not isinstance(uuids, list) or (images and len(uuids) not in (0, len(images))):
            raise BrokenRow("bad_value", "image_uuids is not a list with one for each image")
        names = [identity(uuid, "image_uuids[]") for uuid in uuids]
        if images:
            self._images.update((name, image) for name, image in zip(names, images, strict=False) if name)
            return images
        for name in names:
            if name not in self._images:
                raise BrokenRow("missing_image", f"the image {name[:40]!r} was not sent before")
        return tuple(self._images[name] for name in names)


class SingleTurn(JsonRows):
    """A line is a turn, with `text`, `image`, `timestamp`, `output_length` and perhaps `session_id`."""

    name = "aiperf-single-turn"

    def __init__(self, times: Times | None) -> None:
        super().__init__(times)
        self._turns = Turns(times)

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        return _turn(row, self._turns, number, identity(row.get("session_id"), "session_id"))


class MultiTurn(JsonRows):
    """A line is a conversation, with `session_id` and `turns`, each of which is like a line of single_turn."""

    name = "aiperf-multi-turn"

    def parse(self, line: str, number: int) -> list[Request | Drop]:
        row = json_object(line)
        session, rows = identity(row.get("session_id"), "session_id") or f"line {number}", row.get("turns")
        if not isinstance(rows, list) or not rows:
            raise BrokenRow("missing", "turns is not a list of turns")
        turns, parsed = Turns(self._times), list[Request | Drop]()
        for index, turn in enumerate(rows):
            try:
                if not isinstance(turn, dict):
                    raise BrokenRow("bad_value", f"turns[{index}] is not an object")
                parsed.append(_turn(turn, turns, number, session, index))
            except BrokenRow as broken:
                parsed.append(Drop(number, broken.reason, f"turns[{index}]: {broken.problem}"))
        return parsed


class Mooncake(JsonRows):
    """The format of github.com/kvcache-ai/Mooncake and AIPerf's mooncake_trace.

    A row has lengths with identities of blocks of 512 tokens, or one of `text_input`, `messages` and `payload`. Times
    are milliseconds. Mooncake's own have ticks of three seconds with up to 28 requests, which are sent together.
    """

    name = "mooncake"

    def __init__(self, keys: Keys, times: Times | None) -> None:
        super().__init__(times)
        self._block_tokens = keys.block_tokens
        self._lengths, self._turns = LengthRows(keys, times), Turns(times)

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        given = [key for key in _LITERAL if row.get(key) is not None]
        if len(given) > 1:
            raise BrokenRow("conflict", f"a row has {' and '.join(given)}; give one of them")
        session = identity(row.get("session_id"), "session_id")
        if given in ([], ["input_length"]) and not session:
            return self._lengths.parse(line, number)
        at_ns, think_ns = self._turns.at_ns(row, session)
        prompt: Prompt | None = None
        tokens = None
        body: dict[str, Any] = {}
        match given:
            case ["payload"]:
                body = object_at(row, "payload")
                prompt = Prompt.of_body(body)
            case ["messages"]:
                prompt = Prompt.of_messages(row["messages"])
            case ["text_input"]:
                if not isinstance(row["text_input"], str):
                    raise BrokenRow("bad_value", "text_input is not a string")
                prompt = Prompt.of([row["text_input"]])
            case _:
                tokens = whole(row.get("input_length"), "input_length", MAX_TOKENS, least=1)
        output, notes = output_tokens({**body, **row}, "output_length", "max_completion_tokens", "max_tokens")
        return Request(
            line=number,
            at_ns=at_ns,
            output_tokens=output,
            text_tokens=tokens,
            images=prompt.images if prompt else (),
            layout=prompt.layout if prompt else (),
            blocks=list_of_integers(row.get("hash_ids") or [], "hash_ids"),
            block_tokens=self._block_tokens,
            session=session,
            continues=bool(session) and given != ["payload"],  # a payload is sent as it is
            think_ns=think_ns,
            notes=notes + (prompt.notes if prompt else ()),
        )


def _turn(row: dict[str, Any], turns: Turns, number: int, session: str, index: int = 0) -> Request:
    for key in _OTHER_MEDIA:
        if row.get(key):
            raise BrokenRow("unsupported_media", f"it has {key}, which replay cannot send")
    if row.get("text") is not None and row.get("texts") is not None:
        raise BrokenRow("conflict", "a turn has both text and texts; give one of them")
    at_ns, think_ns = turns.at_ns(row, session)
    texts = [row["text"]] if row.get("text") is not None else _contents(row.get("texts"), "texts")
    if not all(isinstance(text, str) for text in texts):
        raise BrokenRow("bad_value", "text is not a string")
    prompt = Prompt.of([*turns.images(row), *texts])
    output, notes = output_tokens(row, "output_length")
    return Request(
        line=number,
        at_ns=at_ns,
        output_tokens=output,
        images=prompt.images,
        layout=prompt.layout,
        session=session,
        continues=bool(session),
        think_ns=think_ns,
        turn=index,
        notes=notes,
    )


def _contents(value: object, name: str) -> list[Any]:
    """Flatten a list of values, or of `{"name", "contents": [values]}`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BrokenRow("bad_value", f"{name} is not a list")
    found: list[Any] = []
    for item in value:
        contents = item.get("contents") if isinstance(item, dict) else [item]
        if not isinstance(contents, list):
            raise BrokenRow("bad_value", f"{name}[].contents is not a list")
        found += contents
    return found
