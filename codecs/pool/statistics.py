"""The numbers of a pool: enough to choose its size."""

from __future__ import annotations

import msgspec


class PoolStatistics(msgspec.Struct, frozen=True):
    capacity_nbytes: int  #: what could be lent if nothing were, by an elastic pool that has grown
    lent_nbytes: int
    peak_lent_nbytes: int  #: most ever lent at once; choose the budget from this
    free_nbytes: int  #: what could be lent now, if it were in one piece
    longest_free_nbytes: int
    free_ranges: int
    lent_slots: int
    peak_lent_slots: int
    slots: int
    consumers: int
    leases: int  #: ever lent
    refused: int  #: times no range or slot was free
    struck_consumers: int  #: written off because they died
    quarantined_consumers: (
        int  #: that are alive, and are sent nothing more since an acknowledgement of theirs was invalid
    )
    acks_invalid: int  #: acknowledgements of generations that their slot had not had yet
    ended: int  #: leases that came back
    lent_ms: float  #: how long they were out, on average
    longest_lent_ms: float
    reserved_nbytes: int  #: the budget: more memory than that is never held
    mapped_nbytes: int  #: memory that leases may lie in
    retiring_nbytes: int  #: memory that takes no more leases and that a process still holds; counts in the budget
    grown: int = 0  #: chunks that came, over the pool's life
    retired: int = 0  #: chunks that were given back
    growth_waits: int = 0  #: leases that waited for a chunk to come
    growth_refused: int = 0  #: times the GPU had no memory left for a chunk
    growth_failed: int = 0  #: times that making a chunk, or giving one back, failed otherwise

    @property
    def fragmentation(self) -> float:
        """The part of the free bytes that the longest free range leaves out: 0 when they are all in one piece."""
        return 1 - self.longest_free_nbytes / self.free_nbytes if self.free_nbytes else 0.0
