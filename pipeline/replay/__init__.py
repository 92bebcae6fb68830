"""Recorded traces, their schedule, the run and its report."""
