"""A bucketed DistributedDataParallel in readable Python, with PyTorch's interface and PyTorch's bits."""

from ddp_core.bucket import GradBucket
from ddp_core.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel", "GradBucket"]
