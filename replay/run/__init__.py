"""Sending a workload at its times."""
