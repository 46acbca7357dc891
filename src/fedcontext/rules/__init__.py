"""Aggregation rules, side by side, and server optimisers that can follow them."""
