"""PowerSGD's hook and its state, where PyTorch's users, and pickles, look for them."""

from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
