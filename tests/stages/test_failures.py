"""What each stage says of each kind of problem."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import (
    BadItem,
    BadMessage,
    BadRequest,
    LeaseNotReady,
    LeasePoisoned,
    LethalRequest,
    PeerBusy,
    PeerGone,
    PoolFull,
    StaleLease,
)
from tensorferry.stages.failures import RULES, failure_of

ORIGINS = {stage: wire.Origin(stage, 0, 7) for stage in ("tokenizer", "encoder", "scheduler")}


@pytest.mark.parametrize(
    ("problem", "retryable"),
    [
        (BadItem(0, "no image"), ()),
        (BadRequest("no such id"), ()),
        (LethalRequest(4, "encoder-0"), ()),
        (PeerGone("encoder-0", "died"), ("tokenizer", "encoder", "scheduler")),
        (PeerBusy("encoder-0"), ("tokenizer", "encoder")),
        (StaleLease(1, 2, "is over"), ("tokenizer", "encoder", "scheduler")),
        (LeaseNotReady(1, 2, "is late"), ("tokenizer", "scheduler")),
        (LeasePoisoned(1, 2, "is void"), ("tokenizer", "scheduler")),
        (PoolFull(3, 2, 1), ("tokenizer",)),
        (BadMessage("no items"), ("tokenizer",)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_ours_keeps_its_name_and_text(problem: Exception, retryable: tuple[str, ...]) -> None:
    failures = {stage: failure_of(problem, origin) for stage, origin in ORIGINS.items()}
    item = 0 if isinstance(problem, BadItem) else -1
    for stage, failure in failures.items():
        kind = type(problem).__name__
        assert failure == wire.Failure(kind, str(problem), ORIGINS[stage], item, stage in retryable), stage


@pytest.mark.parametrize(
    ("stage", "problem", "kind", "text", "retryable"),
    [
        ("tokenizer", KeyError("a"), "InternalError", "KeyError: 'a'", False),
        ("encoder", KeyError("a"), "EncodeError", "KeyError: 'a'", False),
        ("scheduler", KeyError("a"), "EngineError", "'a'", False),
        ("tokenizer", TimeoutError("not done within 1 s"), "DeadlineExceeded", "not done within 1 s", True),
        ("tokenizer", asyncio.CancelledError("by the client"), "Cancelled", "by the client", False),
        ("encoder", TimeoutError("of a socket"), "EncodeError", "TimeoutError: of a socket", False),
        ("scheduler", TimeoutError("of a socket"), "EngineError", "of a socket", False),
    ],
)
def test_what_is_no_error_of_ours_gets_its_stage_s_kind(
    stage: str, problem: BaseException, kind: str, text: str, retryable: bool
) -> None:
    assert failure_of(problem, ORIGINS[stage]) == wire.Failure(kind, text, ORIGINS[stage], -1, retryable)


@pytest.mark.parametrize("stage", RULES)
@pytest.mark.parametrize("base", [PeerGone, ValueError], ids=lambda base: base.__name__)
def test_a_failure_can_travel_however_long_its_name_and_text(stage: str, base: type[Exception]) -> None:
    arguments = ("encoder-0", "\udcff" * 5000) if base is PeerGone else ("\udcff" * 5000,)
    long: type[Exception] = type("E" * 100, (base,), {})
    failed = wire.Failed(bytes(16), 0, failure_of(long(*arguments), ORIGINS[stage]), 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failed), type=wire.Failed) == failed


@pytest.mark.parametrize("stage", RULES)
def test_an_item_that_the_request_does_not_have_is_none(stage: str) -> None:
    problem = BadItem(3, "no image")
    assert failure_of(problem, ORIGINS[stage], items=4).item == 3
    assert failure_of(problem, ORIGINS[stage], items=3).item == -1
