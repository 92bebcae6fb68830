"""One file a trace format, and the table of them."""
