"""A FAKE of vLLM 0.32's interface of encoder caches: what a connector is made of and called with, and no engine.

It stands on the path of processes that tests start, in place of vLLM, which has an environment of its own.
`tests/vllm/test_fake.py` compares it with the real one.
"""
