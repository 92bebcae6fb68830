"""The plan of a pool's size, made from one replay."""
