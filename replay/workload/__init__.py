"""Requests of a trace to what is sent."""
