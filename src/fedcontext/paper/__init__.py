"""Reproduction of the paper: its experiments, figures and claims."""
