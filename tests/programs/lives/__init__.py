"""The producers and consumers whose deaths `test_death.py` arranges."""
