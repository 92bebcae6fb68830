"""What tensorferry costs, beside what others do for the same job. Run as `python -m benchmarks.run`."""
