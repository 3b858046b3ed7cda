"""Presenting runs: tables in the terminal, TensorBoard logs, plots, and one HTML file."""

from .table import print_tables
from .writing import write

__all__ = ["print_tables", "write"]
