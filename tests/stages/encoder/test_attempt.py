"""Which jobs are encoded again after a failure, and with which others."""

from __future__ import annotations

from tensorferry.stages.encoder.attempt import Attempt

FIRST, SECOND = Attempt("abc"), Attempt("abc", again=True)


def test_jobs_are_encoded_again_together_where_it_is_known_which_was_at_fault() -> None:
    assert FIRST.after_failure("ac", "b") == [Attempt("ac", again=True)]


def test_jobs_are_encoded_again_alone_where_it_is_not_known() -> None:
    assert FIRST.after_failure("abc", "") == [Attempt([job], again=True) for job in "abc"]


def test_the_third_attempt_is_alone_so_that_no_job_has_a_fourth() -> None:
    assert SECOND.after_failure("ac", "b") == [Attempt(["a"], again=True), Attempt(["c"], again=True)]
    assert Attempt("a", again=True).after_failure("", "a") == []


def test_nothing_follows_where_no_job_is_left() -> None:
    assert FIRST.after_failure("", "abc") == []
    assert FIRST.of("") == []


def test_an_attempt_with_fewer_jobs_is_no_new_attempt() -> None:
    assert FIRST.of("ab") == [Attempt("ab")]
    assert SECOND.of("ab") == [Attempt("ab", again=True)]
