"""Faults and attacks in simulations: what they do, and how they change what devices send."""
