"""vLLM's interface of encoder caches, filled by `connectors/ec/`."""
