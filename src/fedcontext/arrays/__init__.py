"""Framework arrays as trees of leaves: NumPy, PyTorch and JAX behind one interface."""
