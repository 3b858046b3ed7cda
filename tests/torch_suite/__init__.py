"""PyTorch's own DDP tests, run on our class and on PyTorch's, side by side.

`python -m tests.torch_suite` takes the tests from the installed wheel; nothing of them is copied here.
"""
