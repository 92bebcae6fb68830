"""The request owner: planning, processing and dispatching."""
