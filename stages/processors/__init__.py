"""Processors: encoded media to pixel tensors, one file each."""
