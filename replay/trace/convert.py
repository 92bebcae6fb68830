"""Traces made from traces: in tensorferry's own format, or a part of the unchanged lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import msgspec

from tensorferry.codecs.errors import OutputError, TraceError
from tensorferry.codecs.system.atomic_file import destination, write_whole
from tensorferry.pipeline.recording.request import Image, Request
from tensorferry.pipeline.recording.trace_line import line_of
from tensorferry.replay.trace.selection import Conversations, Selection
from tensorferry.replay.trace.trace_file import Recording, Tally


def convert(recording: Recording, survey: Tally, selection: Selection, out: Path | BinaryIO) -> None:
    """Write the selected requests to `out` in tensorferry's own format, in the order of time and on the trace's clock.

    A file appears as a whole or not at all. A stream gets each line as it is read, with relative paths from the current
    folder. Image files are not moved. Raises OutputError, also if `out` is the trace itself.
    """
    lines = _own_lines(selection.of(recording.in_order(survey)), recording.folder, _folder_of(out))
    _write(recording, out, _some(recording, selection, lines))


def cut(recording: Recording, selection: Selection, out: Path | BinaryIO) -> Tally:
    """Write the unchanged lines of the selected requests, in the order of the file, below its header.

    The first turn of a line decides on the whole line. A line whose time counts from the turn before is selected with
    that turn. Raises TraceError if the copy could not be read as the same requests, and OutputError as `convert` does.
    """
    if recording.drawn:
        problem = "its requests are drawn from statistics, so it has no lines to cut; use `trace convert`"
        raise TraceError(str(recording.path), None, problem)
    tally = Tally()
    elsewhere = _folder_of(out) != recording.folder
    _write(recording, out, _some(recording, selection, _kept_lines(recording, selection, tally, elsewhere)))
    return tally


def _folder_of(out: Path | BinaryIO) -> Path:
    return out.resolve().parent if isinstance(out, Path) else Path.cwd()


def _write(recording: Recording, out: Path | BinaryIO, lines: Iterable[bytes]) -> None:
    if not isinstance(out, Path):
        out.writelines(lines)
        out.flush()
        return
    if recording.holds(destination(out)):  # a recording cannot be made again
        raise OutputError(str(out), "it is the trace itself, which would be lost; name another file")
    write_whole(out, lines)


def _some(recording: Recording, selection: Selection, lines: Iterable[bytes]) -> Iterator[bytes]:
    """Return the same lines. Raises TraceError at their end if they held no request, since a trace needs one."""
    yield from lines
    if not selection.kept:
        problem = f"all of its {selection.left} requests lie outside the window or the share; widen them"
        raise TraceError(str(recording.path), None, problem)


def _own_lines(requests: Iterable[Request], source: Path, target: Path) -> Iterator[bytes]:
    for request in requests:
        if source != target and any(_relative(image) for image in request.images):
            images = tuple(_moved(image, source, target) for image in request.images)
            request = msgspec.structs.replace(request, images=images)
        yield line_of(request, request.at_ns)


def _moved(image: Image, source: Path, target: Path) -> Image:
    return Image(path=os.path.relpath(source / image.path, target)) if _relative(image) else image


def _relative(image: Image) -> bool:
    return bool(image.path) and not Path(image.path).is_absolute()


def _kept_lines(recording: Recording, selection: Selection, tally: Tally, elsewhere: bool) -> Iterator[bytes]:
    conversations, followed = Conversations(), set[str]()
    header = recording.header
    with closing(recording.lines(tally)) as lines:
        for line, requests in lines:
            first = requests[0]
            kept = first.session in followed if first.think_ns is not None else selection.within(first.at_ns)
            if not (kept and selection.drawn(conversations, first)):
                selection.left += len(requests)
                if first.think_ns is None:
                    followed.discard(first.session)
                continue
            if first.session:
                followed.add(first.session)
            if elsewhere and any(_relative(image) for request in requests for image in request.images):
                problem = "its image paths are relative to it; write the copy beside it, or use `trace convert`"
                raise TraceError(str(recording.path), first.line, problem)
            selection.kept += len(requests)
            if header:  # only once there is a line below it, since a stream cannot take it back
                yield header + b"\n"
                header = b""
            yield line + b"\n"
