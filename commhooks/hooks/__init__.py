"""The public entry points, and the requirements of PyTorch's contract for communication hooks."""
