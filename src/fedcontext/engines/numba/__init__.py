"""Softmax regression compiled with Numba."""
