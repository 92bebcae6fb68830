"""How large a pool has to be, from one replay."""
