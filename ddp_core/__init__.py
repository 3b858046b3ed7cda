"""A bucketed DistributedDataParallel in readable Python, with PyTorch's interface and bit-identical results."""

from ddp_core.bucket import GradBucket
from ddp_core.distributed import DistributedDataParallel
from ddp_core.errors import HookTimeoutError

__all__ = ["DistributedDataParallel", "GradBucket", "HookTimeoutError"]
