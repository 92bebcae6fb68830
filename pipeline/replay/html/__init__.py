"""Self-contained pages of what replays have found."""
