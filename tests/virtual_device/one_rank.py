"""One rank of several that do not exist, and a bucket that it hands to a hook."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.devices import SideStream
from commhooks.engine.engine import Engine
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.specs import Spec
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.inline import InlineScheduler
from commhooks.scheduling.policy import PolicyName
from experiments.studies.bench.given import GPT_SHAPES, GivenBucket, Shape, resnet18_shapes
from tests.virtual_device.counting import Cost, Counting

RANKS = 8
"""The number of ranks; PyTorch's "fake" process group answers every collective with this rank's own input."""
STEPS_BEFORE = 3
"""The number of steps before the counted one: they lay out state and plans, and PyTorch's PowerSGD begins with the
third."""
POWERSGD = "torch.powersgd"
"""PyTorch's, at rank 4."""
PEERS: Mapping[str, Callable[..., Any]] = {
    "torch.all-reduce": default_hooks.allreduce_hook,
    "torch.fp16": default_hooks.fp16_compress_hook,
    "torch.bf16": default_hooks.bf16_compress_hook,
}
"""PyTorch's hooks without state."""
MODELS: Mapping[str, Sequence[Shape]] = {
    "ResNet-18": resnet18_shapes(),
    "GPT block": GPT_SHAPES[:8],
    "embedding": [(50_000, 800)],
}
"""Shapes of parameters, all in one bucket."""
Hook = Callable[[Any], Any]


class _Connection:
    """The connection of a hook that runs in the caller's own thread, as it does on NCCL."""

    policy: PolicyName = "fifo"

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._communicator = ProcessGroupCommunicator(process_group, has_tensor_forms=True)
        self.rank, self.world_size = self._communicator.rank, self._communicator.world_size

    def carries_groups(self, device: torch.device) -> bool:
        """Return False, as on NCCL."""
        return False

    def join(self, name: str = "") -> int:
        """Return how many channels were reserved before: none."""
        return 0

    def check_ranks(self) -> None:
        """Do nothing: there is one rank."""

    def open(self, channel: ConnectionChannel, device: torch.device, fingerprint: str) -> InlineScheduler:
        """Open the channel; there is no other rank to compare settings with."""
        streams = SideStream(device), SideStream(device)
        scheduler = InlineScheduler(self._communicator, lambda text, kernels: None, streams)
        scheduler.open(channel, fingerprint)
        return scheduler

    def leave(self) -> None:
        """Do nothing: nothing runs in the background."""


class _PeersGroup(dist.ProcessGroup):
    """The group as PyTorch's hooks want it: they take the answer from the work's future."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # 'Missing "store"': the stub has one constructor of two
        self._inner = inner

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible' with an overload
        """Answer at once with what was put in."""
        self._inner.allreduce(tensors, options or dist.AllreduceOptions())
        return _Done(tensors)


class _Done(dist.Work):
    """A work that is done."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        devices: list[Any] = [tensor.device for tensor in tensors]
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> Any:
        """Return the future of the answer."""
        return self._future


@contextlib.contextmanager
def fake_group() -> Iterator[dist.ProcessGroup]:
    """Make this process rank 0 of `RANKS` ranks, the others of which do not exist, within the context."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield dist.group.WORLD  # type: ignore[misc]  # "object has no attribute": it is None only before
    finally:
        dist.destroy_process_group()


def count(hook: str, shapes: Sequence[Shape], group: dist.ProcessGroup, device: torch.device) -> Cost:
    """Return the cost of a step under a hook of this name, in one bucket of fp32 gradients of these shapes.

    A hook is named as for `make_compressor`, or "torch." and one of PyTorch's: all-reduce, fp16, bf16, powersgd.
    """
    generator = torch.Generator().manual_seed(0)
    bucket = GivenBucket([torch.zeros(shape, device=device) for shape in shapes])
    gradient = torch.randn(bucket.buffer().numel(), generator=generator)
    run = _hook(hook, bucket, group)
    for _ in range(STEPS_BEFORE):
        bucket.buffer().copy_(gradient)
        run(bucket).wait()
    bucket.buffer().copy_(gradient)
    counting = Counting(device)
    # PyTorch's PowerSGD waits for the whole device, of which operators show nothing.
    with mock.patch.object(torch.cuda, "synchronize", wraps=torch.cuda.synchronize) as synchronize, counting:
        run(bucket).wait()
    counting.cost.waits += synchronize.call_count
    return counting.cost


def _hook(hook: str, bucket: GivenBucket, group: dist.ProcessGroup) -> Hook:
    if hook in PEERS:
        return functools.partial(PEERS[hook], _PeersGroup(group))
    if hook == POWERSGD:
        state = powerSGD_hook.PowerSGDState(_PeersGroup(group), matrix_approximation_rank=4, start_powerSGD_iter=2)
        return functools.partial(powerSGD_hook.powerSGD_hook, state)
    engine = Engine(make_hook(Spec.parse(hook)), _Connection(group), may_join=False)
    engine.bind([(f"layer{number}", parameter) for number, parameter in enumerate(bucket.parameters())])
    return engine.run
