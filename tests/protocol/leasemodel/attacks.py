"""The faults that must be found: which clause is broken, in which small world, and which law falls.

H1 and H2 were shipped by others. The rest have the names of the list that the protocol was designed against:
A, wrong data or a double result; B, a wedge or a lost process; C, a leak; L12, promise L12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensorferry.codecs.pool.ledger import Grant, Ledger, Words

from .laws import Law
from .rules import Gate, Rules


@dataclass(frozen=True)
class Attack:
    name: str
    says: str
    rules: Rules
    scenario: str
    law: Law


ATTACKS = [
    Attack("H1", "publish before the copy has finished", Rules(ready_follows_the_write=False), "plain", Law.TAINT),
    Attack(
        "H2", "acknowledge on the host before the copy has run", Rules(ack_follows_the_read=False), "plain", Law.OVERLAP
    ),
    Attack(
        "A1",
        "a cache hit acknowledges before the late copy has run, and reclaim ignores ready",
        Rules(reclaim_needs_ready=False),
        "cache hits",
        Law.OVERLAP,
    ),
    Attack(
        "A2",
        "a reserved lease is cancelled while its write is queued",
        Rules(cancel_waits_for_the_writer=False),
        "hits and cancels",
        Law.OVERLAP,
    ),
    Attack(
        "A3",
        "ready is put on another stream than the write",
        Rules(ready_is_on_the_writing_stream=False),
        "plain",
        Law.TAINT,
    ),
    Attack(
        "A3b",
        "the acknowledgement is put on another stream than the read",
        Rules(ack_is_on_the_reading_stream=False),
        "plain",
        Law.OVERLAP,
    ),
    Attack(
        "A4",
        "a stopped owner's lease goes to another rank, which acknowledges for both",
        Rules(redispatch_is_a_new_lease=False),
        "a process stops",
        Law.OVERLAP,
    ),
    Attack(
        "A6",
        "a stuck wait is let go by the CPU, and garbage looks ready",
        Rules(gate=Gate.STREAM),
        "the producer dies",
        Law.TAINT,
    ),
    Attack(
        "A6b",
        "poison inside ready is erased by a late ready",
        Rules(gate=Gate.STREAM_POISON_IN_READY),
        "the producer dies",
        Law.TAINT,
    ),
    Attack(
        "A7",
        "mail for a rank that died reaches its successor",
        Rules(mail_is_for_one_epoch=False),
        "a consumer dies",
        Law.OVERLAP,
    ),
    Attack(
        "A8",
        "one packed lease with items of two owners, the first acknowledges for all",
        Rules(need_names_every_reader=False),
        "two owners",
        Law.OVERLAP,
    ),
    Attack(
        "A9",
        "two processes with different views of who is there: two owners",
        Rules(ranks_come_with_the_message=False),
        "a group, and rumours",
        Law.OVERLAP,
    ),
    Attack(
        "A9b",
        "two processes with different views of who is there: no owner",
        Rules(ranks_come_with_the_message=False),
        "three, and rumours",
        Law.LEAK,
    ),
    Attack(
        "A10",
        "a request is cancelled while its read is queued, and the host acknowledges",
        Rules(what_is_queued_is_released_by_its_stream=False),
        "hits and cancels",
        Law.OVERLAP,
    ),
    Attack(
        "A11",
        "a lease is open twice in a process, and the first acknowledgement frees it",
        Rules(one_entry_per_lease_and_process=False),
        "doubled mail",
        Law.OVERLAP,
    ),
    Attack(
        "A11b",
        "a lease is forgotten with its acknowledgement still queued, and then opened again",
        Rules(entries_stay_until_the_ack_is_seen=False),
        "doubled mail",
        Law.OVERLAP,
    ),
    Attack(
        "A13",
        "a chunk was retired and grown again, and a cached import maps the old memory",
        Rules(imports_are_keyed_by_serial=False),
        "an elastic pool",
        Law.TAINT,
    ),
    Attack(
        "A13c",
        "a chunk comes under the serial of one that was retired, and a cached import maps the old memory",
        Rules(serials_are_not_used_again=False),
        "an elastic pool",
        Law.TAINT,
    ),
    Attack(
        "A13b",
        "a producer restarts under its old pool id, and cached imports map the old memory",
        Rules(pool_ids_carry_a_nonce=False),
        "the producer restarts",
        Law.TAINT,
    ),
    Attack(
        "A14",
        "one of two sends raises, the lease counts as not sent and is cancelled",
        Rules(a_column_is_marked_before_its_send=False),
        "all read",
        Law.OVERLAP,
    ),
    Attack(
        "A15",
        "a consumer that is only slow is written off",
        Rules(a_timeout_is_no_proof=False),
        "a process stops",
        Law.OVERLAP,
    ),
    Attack(
        "A17",
        "a consumer is written off while its queued work goes on",
        Rules(a_death_is_proven_after_its_drain=False),
        "a consumer dies",
        Law.OVERLAP,
    ),
    Attack(
        "A18",
        "a late acknowledgement by message is handled as a store",
        Rules(released_messages_touch_the_ledger_only=False),
        "another node",
        Law.FORWARD,
    ),
    Attack(
        "A19",
        "a late answer and the one of the next attempt are both taken",
        Rules(the_first_current_answer_wins=False),
        "a process stops",
        Law.ONE_OUTCOME,
    ),
    Attack(
        "B1",
        "a stream is held on a wait, and the thread that would let it go waits for the stream",
        Rules(gate=Gate.STREAM),
        "calls that synchronise",
        Law.WEDGE,
    ),
    Attack(
        "B2",
        "a dead producer's pool is unmapped under queued reads",
        Rules(unmap_after_the_last_ack=False),
        "the producer dies",
        Law.UNMAP,
    ),
    Attack(
        "B3",
        "ranks wait for space while they hold features, the scheduler while it holds halves",
        Rules(embeddings_never_wait=False, schedulers_copy_out_on_arrival=False),
        "pressure",
        Law.WEDGE,
    ),
    Attack(
        "C1",
        "the owner acknowledges for a group of words, and dies before the last",
        Rules(need_names_the_owner_alone=False),
        "a group",
        Law.LEAK,
    ),
    Attack(
        "C2",
        "a former life's late acknowledgement lands in its successor's word",
        Rules(a_life_has_an_ack_page_of_its_own=False),
        "a consumer dies",
        Law.ONE_WRITER,
    ),
    Attack(
        "C2b",
        "what a new life is sent is booked on the column of its former life",
        Rules(a_column_is_of_one_life=False),
        "a consumer dies",
        Law.OVERLAP,
    ),
    Attack(
        "C3",
        "retired memory that importers still map does not count",
        Rules(retired_memory_counts_while_imported=False),
        "an elastic pool at its budget",
        Law.BUDGET,
    ),
    Attack(
        "L12",
        "a producer makes a lease ready and dies between a consumer's look and its verdict",
        Rules(a_death_is_followed_by_one_more_look=False),
        "the producer dies",
        Law.FINISH,
    ),
]


# --- the ledger that ships with one method gone wrong, to show that it is what is tried -------------------------------


class RetractsBlindly(Ledger):
    """As first shipped: raises for a column that was struck between its dispatch and its refused send."""

    def retract(self, grant: Grant, column: int) -> None:
        self._opened(grant).remove(column)
        self._need[column][grant.slot] = 0


class ReusesColumns(Ledger):
    """As first shipped: a newcomer gets the column of a dead one, and owes what only the dead was told."""

    def admit(self) -> int:
        column = next(number for number in range(len(self._need) + 1) if number not in self._need)
        self._need[column] = self._due * 0
        return column


class CancelsAtOnce(Ledger):
    """Gives the range back although its writer may still write (A2)."""

    def settle(self, grant: Grant) -> None:
        told = bool(self._opened(grant))
        super().settle(grant)
        if not told:
            self._end(grant.slot)


class ForgetsToForget(Ledger):
    """Leaves a dead consumer in the list of who must acknowledge."""

    def strike(self, column: int) -> None:
        del self._need[column]


class TrustsTheSilent(Ledger):
    """Takes a column that has no words for one that has acknowledged (A18)."""

    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(ready, {column: acks.get(column, self._due) for column in self._need}, limit)


class NeedsNobody(Ledger):
    """Names the columns of a lease, and does not wait for their words."""

    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(ready, {column: self._due.copy() for column in self._need}, limit)


LEDGER_FAULTS: list[tuple[type[Ledger], str, Law]] = [
    (RetractsBlindly, "all read, one dies", Law.BOOKS),
    (ReusesColumns, "all read, one comes back", Law.LEAK),
    (CancelsAtOnce, "hits and cancels", Law.OVERLAP),
    (ForgetsToForget, "a consumer dies", Law.BOOKS),
    (TrustsTheSilent, "another node", Law.OVERLAP),
    (NeedsNobody, "all read", Law.OVERLAP),
]
