"""Training backends: each trains the devices of a round; all agree with the NumPy reference."""
