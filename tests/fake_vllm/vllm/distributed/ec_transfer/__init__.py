"""FAKE, see `vllm/__init__.py`."""
