"""A recorded trace, from file to table."""
