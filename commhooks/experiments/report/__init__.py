"""Presenting runs: tables in the terminal, TensorBoard logs, plots, and one HTML file."""
