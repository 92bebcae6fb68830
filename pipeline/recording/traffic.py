"""Where a deployment's live traffic is recorded: a part for each tokenizer worker, one file once all have ended.

Parts are in tensorferry's own format too, so what a machine that lost its power leaves can be replayed, part by part.
All of it is the user's alone, being what others have asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog

from tensorferry.codecs.errors import DeploymentError
from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.pipeline.deployment.spec import Deployment

log = structlog.get_logger()

PRIVATE = 0o600


class _Timed(msgspec.Struct):
    at_ms: float


_decode = msgspec.json.Decoder(_Timed).decode


def part_of(record: Path, worker: int) -> Path:
    """What one worker writes."""
    return record.with_name(f"{record.name}.tokenizer-{worker}.part")


def media_folder(record: Path) -> Path:
    """Where images are kept, each under the SHA-256 of its bytes."""
    return record.with_name(f"{record.name}.media")


def refuse_existing(deployment: Deployment) -> None:
    """Raise DeploymentError for a record that is there already, or parts of one, or a folder that is not there."""
    if deployment.telemetry.record is None:
        return
    record = Path(deployment.telemetry.record)
    if not record.parent.is_dir():
        raise DeploymentError(f"telemetry.record: {record.parent} is no folder; make it first")
    for path in (record, *record.parent.glob(f"{record.name}.tokenizer-*.part")):
        if path.exists():
            raise DeploymentError(f"telemetry.record: {path} is there already; name another file, or move it away")


def gather(deployment: Deployment) -> None:
    """One file of all parts, in the order of time; it appears whole, and then the parts go. Every worker has ended."""
    if deployment.telemetry.record is None:
        return
    record = Path(deployment.telemetry.record)
    parts = [part for worker in range(deployment.tokenizer.workers) if (part := part_of(record, worker)).exists()]
    if not parts:  # no worker came so far
        return
    with ExitStack() as undo:
        files = [undo.enter_context(part.open("rb")) for part in parts]
        write_whole(record, _merged(files), PRIVATE)
    for part in parts:
        part.unlink()
    log.info("traffic_recorded", file=str(record), nbytes=record.stat().st_size)


def _merged(parts: Sequence[BinaryIO]) -> Iterator[bytes]:
    """The lines of all parts in the order of time, each in the order of its file where times are equal.

    A worker writes a request once it knows what is in it, so its lines are not in order. Only their times and places
    are held in memory, 24 bytes a line and a Python int. Half of a line, which a worker that was killed may have left,
    is left out.
    """
    times, files, places = array("d"), array("q"), array("q")
    for number, part in enumerate(parts):
        place = 0
        for line in part:
            try:
                if line.endswith(b"\n") and not line.isspace():
                    times.append(_decode(line).at_ms)
                    files.append(number)
                    places.append(place)
            except msgspec.MsgspecError:
                log.warning("record_torn", nbytes=len(line))
            place += len(line)
    for row in sorted(range(len(times)), key=times.__getitem__):
        part = parts[files[row]]
        part.seek(places[row])
        yield part.readline()
