"""The trace formats, and the table of them."""
