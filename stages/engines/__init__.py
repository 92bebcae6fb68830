"""Engine adapters: what a scheduler hands its batches to, one file each."""
