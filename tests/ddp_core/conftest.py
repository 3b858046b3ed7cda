"""A world of one rank, in the test's own process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import metadata

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@pytest.fixture
def alone() -> Iterator[None]:
    """Make this process the only rank of a Gloo group."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if metadata.version("torch").startswith("2.6."):
        time.sleep(0.2)  # it hangs there while Gloo's thread still lets go of the last collective
    dist.destroy_process_group()
