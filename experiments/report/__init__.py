"""Presenting runs: a table in the terminal, TensorBoard logs, plots, and one HTML file."""
