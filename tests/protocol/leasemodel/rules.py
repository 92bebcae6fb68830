"""The rules of docs/protocol.md, clause by clause, each a switch. All on is the protocol; one off is a fault."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Gate(Enum):
    """R3: how a consumer makes sure that the bytes are there."""

    HOST = "the CPU looks at lease, ready and poison before it queues anything"
    STREAM = "a stream waits for ready; stuck, it is let go by storing the generation into ready"
    STREAM_POISON_IN_READY = "a stream waits for ready; stuck, it is let go by storing a poison value into ready"


@dataclass(frozen=True)
class Rules:
    # R1: reclaim needs ready, also for leases that nobody waits for
    reclaim_needs_ready: bool = True
    cancel_waits_for_the_writer: bool = True  #: a cancelled lease's ready goes on the stream that writes it
    # R2: one writer per word; `need` names who must acknowledge
    need_names_the_owner_alone: bool = True
    need_names_every_reader: bool = True  #: a packed lease has one owner, so two owners means two leases
    a_life_has_an_ack_page_of_its_own: bool = True
    a_column_is_of_one_life: bool = True  #: a producer that hears of a new life forgets the old one's column
    released_messages_touch_the_ledger_only: bool = True
    # R3: a lease that is not ready becomes an error, never a value
    gate: Gate = Gate.HOST
    a_death_is_followed_by_one_more_look: bool = True  #: ready may come between a look and the death
    # R4: what a dispatch carries, and what a second one is
    mail_is_for_one_epoch: bool = True
    ranks_come_with_the_message: bool = True
    redispatch_is_a_new_lease: bool = True
    the_first_current_answer_wins: bool = True
    # R5: a lease remembers its stream
    ready_follows_the_write: bool = True
    ready_is_on_the_writing_stream: bool = True
    ack_follows_the_read: bool = True
    ack_is_on_the_reading_stream: bool = True
    what_is_queued_is_released_by_its_stream: bool = True
    # R6: no id is reused; one reader table a process
    imports_are_keyed_by_serial: bool = True
    serials_are_not_used_again: bool = True
    pool_ids_carry_a_nonce: bool = True
    one_entry_per_lease_and_process: bool = True
    entries_stay_until_the_ack_is_seen: bool = True
    # R7: unmapping, and what counts as used
    unmap_after_the_last_ack: bool = True
    retired_memory_counts_while_imported: bool = True
    # R8: only a death proves a death, and it is proven only once its work has drained
    a_timeout_is_no_proof: bool = True
    a_death_is_proven_after_its_drain: bool = True
    # R9: never wait for pool space while holding a lease (see `pressure`)
    embeddings_never_wait: bool = True
    schedulers_copy_out_on_arrival: bool = True
    # step 3: what may have been sent counts as sent
    a_column_is_marked_before_its_send: bool = True


PROTOCOL = Rules()
