"""The public entry points, and what PyTorch's contract for communication hooks requires of them."""
