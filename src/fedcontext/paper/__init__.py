"""The paper's experiments: what they are, the figures, and what became of its claims."""
