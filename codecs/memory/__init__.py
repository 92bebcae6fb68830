"""Kinds of shareable memory, one file each."""
