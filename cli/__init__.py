"""The commands. Each one parses, calls one function and prints."""
