"""PyTorch's own DDP tests, of the installed wheel, on our class and on PyTorch's: `python -m tests.torch_suite`."""
