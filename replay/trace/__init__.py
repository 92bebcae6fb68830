"""The step from a trace file to requests."""
