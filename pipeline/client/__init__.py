"""A client of a deployment, and what it may be given."""
