"""Model adapters: vision encoders, one file each."""
