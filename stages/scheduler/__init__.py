"""A scheduler rank: collects embeddings and feeds the engine."""
