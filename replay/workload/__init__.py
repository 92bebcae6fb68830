"""The step from the requests of a trace to the bytes that are sent."""
