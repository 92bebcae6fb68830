"""The sending of a workload at its times."""
