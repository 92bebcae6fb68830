"""What processes say: logs, counters, metrics, spans."""
