"""Writes what clients ask of one tokenizer worker as a trace, in a thread of its own: no request waits for it."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from threading import Event, Thread

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import OutputError, RequestError
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.pipeline.recording.request import MAX_TOKENS, Image, Request
from tensorferry.pipeline.recording.trace_line import line_of
from tensorferry.pipeline.recording.traffic import PRIVATE
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image import header
from tensorferry.stages.tokenizer.planner import Prompt
from tensorferry.stages.tokenizer.text import TextEncoder

log = structlog.get_logger()

#: Requests whose line is not written yet, at most: they hold the messages that they came in.
MOST_WAITING = 256
EVERY_S = 0.02  #: what came meanwhile is written together: waking the thread for each costs as much as writing it

#: When it came; and the request, or what it is made of later, off the event loop.
_Entry = tuple[int, Request | tuple[wire.Submit, Sequence[Buffer], Prompt | None]]


class Recorder:
    """What is asked, not what comes of it: requests that are told `busy` are in it too.

    Of words only how many tokens they are is kept, and of an image its upright size; with `media`, both as they are. A
    request that the format has no words for, as with a video, is counted and left out; so is one that comes while too
    many wait.
    """

    def __init__(
        self, part: Path, media: Path | None, text: TextEncoder, limits: LimitsSpec, counters: Counters
    ) -> None:
        """part: a file, begun, or continued by a worker that was started again. media: a folder, made if need be; None:
        metadata alone."""
        self._media, self._text, self._limits, self._counters = media, text, limits, counters
        self._waiting: deque[_Entry] = deque()
        self._closing = Event()
        self._failed = False
        self._file: FileIO | None = None
        self._torn = False  # the file ends within a line, or may
        try:
            self._file = open(part, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, PRIVATE))
            self._torn = self._file.tell() > 0  # whatever its predecessor had half written is a line of its own
            if media is not None:
                media.mkdir(0o700, exist_ok=True)
        except OSError as problem:
            self._complain(problem)
        self._thread = Thread(target=self._run, name="recorder")
        self._thread.start()

    def take(self, submit: wire.Submit, frames: Sequence[Buffer], at_ns: int, prompt: Prompt | None = None) -> None:
        """A request that came at `at_ns`, monotonic. Never waits.

        prompt: as it was planned, which saves looking at its images and words again; None: it was not.
        """
        if len(self._waiting) >= MOST_WAITING:
            self._counters.count("requests_unrecorded")
        elif prompt is None or self._media is not None:
            self._waiting.append((at_ns, (submit, frames, prompt)))
        else:  # a message that is kept costs its successor fresh pages; the few numbers are at hand
            try:
                self._waiting.append((at_ns, self._request(submit, frames, prompt)))
            except _NoWords:
                self._counters.count("requests_unrecorded")

    def close(self) -> None:
        """Write what waits, and end."""
        self._closing.set()
        self._thread.join()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        """What waits, to the file."""
        while self._waiting:
            at_ns, entry = self._waiting.popleft()
            try:
                request = entry if isinstance(entry, Request) else self._request(*entry)
                self._put(line_of(request, at_ns))
            except _NoWords:
                self._counters.count("requests_unrecorded")
            except (OSError, OutputError) as problem:
                self._counters.count("requests_unrecorded")
                self._complain(problem)

    def _put(self, line: bytes) -> None:
        """Raises OSError, having written all of it or a part, which is then a line of its own."""
        if self._file is None:
            raise FileNotFoundError
        data = b"\n" + line if self._torn else line
        written = self._file.write(data)
        self._torn = written != len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _complain(self, problem: Exception) -> None:
        """Once: a full disk must not end a worker, nor fill its log."""
        if not self._failed:
            self._failed = True
            log.error("not_recorded", problem=str(problem))

    def _request(self, submit: wire.Submit, frames: Sequence[Buffer], prompt: Prompt | None) -> Request:
        images: list[Image] = []
        layout: list[str | int] = []
        ids = 0
        for part in submit.parts:
            match part:
                case wire.TextPart(text=text):
                    layout.append(text)
                case wire.TokensPart():
                    ids += len(part.ids) // 4
                case wire.ImagePart(frame=frame) if frame < len(frames):
                    size = None if prompt is None else prompt.plans[len(images)].size
                    layout.append(len(images))
                    images.append(self._image(frames[frame], size))
                case _:
                    raise _NoWords
        words = [part for part in layout if isinstance(part, str)]
        verbatim = self._media is not None and not ids
        if not verbatim:
            ids = prompt.text_tokens if prompt is not None else ids + sum(map(self._count, words))
        if not images and not ids and not (verbatim and any(words)):
            raise _NoWords
        return Request(
            line=0,
            at_ns=0,
            output_tokens=submit.output_tokens,
            id=submit.request.hex(),
            text_tokens=min(ids, MAX_TOKENS) or None,
            images=tuple(images),
            layout=tuple(layout) if verbatim else (),
        )

    def _count(self, text: str) -> int:
        try:
            return len(self._text.encode(text))
        except RequestError as problem:
            raise _NoWords from problem

    def _image(self, data: Buffer, size: tuple[int, int] | None) -> Image:
        if self._media is not None:
            name = hashlib.sha256(data).hexdigest()
            path = self._media / name
            if not path.exists():
                write_whole(path, [bytes(data)], PRIVATE)
            return Image(path=f"{self._media.name}/{name}")
        if size is not None:
            return Image(width=size[0], height=size[1])
        try:
            known = header(data, self._limits)
        except BadMedia:  # what becomes of it is a result; that there was one is known
            return Image()
        return Image(width=known.width, height=known.height)


class _NoWords(Exception):
    """Our format cannot say this."""
