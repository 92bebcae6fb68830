"""ZeroMQ: sockets, addresses, keys, and who is let in."""
