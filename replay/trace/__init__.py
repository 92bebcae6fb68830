"""A trace file to requests."""
