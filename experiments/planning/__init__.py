"""Measurements before training: the costs of a network, the split of a step's time, and the hook that pays."""
