"""Compression of gradients: random rotations, few-bit codes and sketches."""
