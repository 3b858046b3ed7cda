"""Our DDP beside PyTorch's and beside local training: the same parameters, step by step."""
