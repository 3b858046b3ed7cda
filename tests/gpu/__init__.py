"""What needs a CUDA device. `pytest -m gpu`; skipped, with the reason, where there is none."""
