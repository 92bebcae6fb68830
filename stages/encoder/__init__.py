"""An encoder rank: queue, batches, embeddings."""
