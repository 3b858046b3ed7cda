"""Checkpoints of a model, its optimiser and its hooks: folders of files, and torch.distributed.checkpoint."""
