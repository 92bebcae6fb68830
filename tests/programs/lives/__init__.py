"""The producers and consumers whose deaths `test_process_death.py` arranges."""
