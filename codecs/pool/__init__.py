"""The bounded pool of leases: pure ledger, control words, memory."""
