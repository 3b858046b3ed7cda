"""PowerSGD's hook and its state, under the module name by which PyTorch's users and pickles find them."""

from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
