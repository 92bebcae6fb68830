"""What may never happen, and what must be so once nothing can go on by itself."""

from __future__ import annotations

from enum import Enum


class Law(Enum):
    TAINT = "every byte behind an accepted result is the request's own, and whole"
    OVERLAP = "no write begins on bytes that another lease's access is queued for or running on"
    FORWARD = "a control word never decreases"
    ONE_WRITER = "a control word has one writer"
    FINISH = "what was ready when its producer died is read, and not refused"
    UNMAP = "nothing is unmapped under its own queued reads or acknowledgements"
    BUDGET = "physical memory, with what importers still hold, stays in the budget"
    ONE_OUTCOME = "a request has one outcome"
    LEAK = "at rest every lease is back, except what a stopped process may still read"
    WEDGE = "at rest nothing is queued or waiting, nothing is mapped in vain, and every request has ended"
    BOOKS = "the ledger refuses nothing that the protocol does, lends no byte twice and loses none"


class LawBroken(Exception):
    """The end of a search: what happened, in a sentence."""

    def __init__(self, law: Law, story: str) -> None:
        super().__init__(law, story)
        self.law, self.story = law, story
