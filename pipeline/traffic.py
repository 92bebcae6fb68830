"""Where a deployment's live traffic is recorded: a part for each tokenizer worker, one file once all have ended.

Parts are in tensorferry's own format too, so what a machine that lost its power leaves can be replayed, part by part.
All of it is the user's alone, being what others have asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from heapq import merge
from pathlib import Path

import msgspec
import structlog

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.config import Deployment
from tensorferry.pipeline.replay.whole import write_whole

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
        lines = merge(*map(_requests, files), key=lambda timed: timed[0])
        write_whole(record, (line for _, line in lines), PRIVATE)
    for part in parts:
        part.unlink()
    log.info("traffic_recorded", file=str(record), nbytes=record.stat().st_size)


def _requests(part: Iterable[bytes]) -> Iterator[tuple[float, bytes]]:
    """(time, line), without the half of a line that a worker which was killed may have left."""
    for line in part:
        try:
            if line.endswith(b"\n") and not line.isspace():
                yield _decode(line).at_ms, line
        except msgspec.MsgspecError:
            log.warning("record_torn", nbytes=len(line))
