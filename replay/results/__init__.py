"""What came of a run: tables, files, comparisons."""
