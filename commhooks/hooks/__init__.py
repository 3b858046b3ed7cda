"""What PyTorch's contract for communication hooks dictates."""
