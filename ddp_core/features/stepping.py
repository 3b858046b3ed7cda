"""Optimisers of ``_apply_optimizer_in_backward``, which step in the backward pass: here, once the mean is known."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Parameter

from ddp_core.buckets import Bucket
from ddp_core.feature import Feature


class StepsInBackward(Feature):
    """Steps on means."""

    def on_mean(self, bucket: Bucket) -> None:
        """Step on the gradients of a bucket, then remove them."""
        for parameter in bucket.members:
            for optimizer in getattr(parameter, "_in_backward_optimizers", []):
                optimizer.step()
                parameter.grad = None


def take_over(parameters: Sequence[Parameter]) -> bool:
    """Keep these optimisers from stepping on local gradients by themselves; return True if there are any."""
    if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        return False
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    return True
