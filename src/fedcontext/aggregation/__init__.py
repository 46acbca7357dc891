"""Aggregation: the entry point `aggregate`, its input checks, and rounds folded into sums as updates arrive."""
