"""Pools that grow: chunks, their descriptors, and messages where pages are not shared."""
