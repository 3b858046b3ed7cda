"""PowerSGD's hook and its state, under the module name that PyTorch's users and pickles refer to."""

from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
