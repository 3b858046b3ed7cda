"""A bucketed DistributedDataParallel in readable Python, with PyTorch's interface and bit-identical results."""

from ddp_core.distributed import DistributedDataParallel
from ddp_core.errors import HookTimeoutError
from ddp_core.guard import NotAveragedError, NotAveragedWarning, set_guard, steps_locally
from ddp_core.hooks import GradBucket

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "HookTimeoutError",
    "NotAveragedError",
    "NotAveragedWarning",
    "set_guard",
    "steps_locally",
]
