"""What a rank with a device does in training: each scenario returns tensors that no schedule may change."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
import ddp_core
from commhooks.control import Adaptive
from commhooks.default_hooks import fp16_compress_wrapper

STEPS = 4


def batch(rank: int, step: int) -> Tensor:
    """Return what comes from pinned memory, and may not be there yet."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(16, 20, generator=generator).pin_memory().cuda(non_blocking=True)


class Net(nn.Module):
    """Three layers; the second one runs on a stream of its own, if there is one."""

    def __init__(self, side: torch.cuda.Stream | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(20, 30), nn.Linear(30, 40), nn.Linear(40, 5)
        self.unused = nn.Linear(3, 3)
        self._side = side

    def forward(self, x: Tensor) -> Tensor:
        """Return 5 numbers for each row of 20."""
        x = torch.relu(self.first(x))
        if self._side is None:
            return self.third(torch.relu(self.second(x)))  # type: ignore[no-any-return]  # a module returns Any
        own = torch.cuda.current_stream()
        self._side.wait_stream(own)
        with torch.cuda.stream(self._side):
            y = torch.relu(self.second(x))
        x.record_stream(self._side)
        own.wait_stream(self._side)
        y.record_stream(own)
        return self.third(y)  # type: ignore[no-any-return]


class Run:
    """One rank's model, in several buckets, its optimizer and its data."""

    def __init__(self, rank: int, side: torch.cuda.Stream | None = None, **settings: Any) -> None:
        settings = {"find_unused_parameters": True, "bucket_cap_mb": 0.004, **settings}
        self.model = ddp_core.DistributedDataParallel(Net(side).cuda(), **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._rank = rank

    def backward(self, step: int) -> None:
        """Run a backward pass."""
        self.model(batch(self._rank, step)).square().mean().backward()

    def step(self, step: int) -> None:
        """Run a backward pass, and use its means."""
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        self.backward(step)
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        """Return copies on the CPU."""
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def no_sync(rank: int) -> list[Tensor]:
    """Accumulate the gradients of two passes, of which the second one is synchronised."""
    run = Run(rank)
    attachment = commhooks.attach(run.model, "powersgd", residuals="host", atomic=True)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        with run.model.no_sync():
            run.backward(2 * step)
        run.backward(2 * step + 1)
        run.optimizer.step()
    attachment.close()
    return run.parameters()


def own_stream(rank: int) -> list[Tensor]:
    """Run a part of the model on another stream, where autograd then runs its backward pass."""
    results = []
    for policy in ("fifo", "fused"):
        run = Run(rank, torch.cuda.Stream(), gradient_as_bucket_view=True)
        attachment = commhooks.attach(run.model, "powersgd", policy=policy)
        for step in range(STEPS):
            run.step(step)
        attachment.close()
        results += run.parameters()
    return results


def replacing(rank: int) -> list[Tensor]:
    """Replace the compressor between steps; what was not sent yet goes to the next one."""
    run = Run(rank)
    attachment = commhooks.attach(run.model, "top-k:ratio=0.1", residuals="host")
    for step, name in enumerate(["int8", "powersgd", "all-reduce", "fp16"]):
        run.step(step)
        attachment.replace(name)
    run.step(STEPS)
    attachment.close()
    return run.parameters()


def exchanging(rank: int) -> list[Tensor]:
    """Average tensors without a model, round after round, two of them under way at once."""
    shapes = {"a": (24, 40), "b": (7,), "c": (30, 20)}
    exchanger = commhooks.Exchanger(
        {name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}, "powersgd"
    )
    means = []
    for round_number in range(STEPS):
        rounds = []
        for half in range(2):
            generator = torch.Generator().manual_seed(100 * round_number + 10 * half + rank)
            own = {
                name: torch.randn(shape, generator=generator).pin_memory().cuda(non_blocking=True)
                for name, shape in shapes.items()
            }
            rounds.append((own, exchanger.begin(own)))
        for own, averaging in rounds:
            averaging.write(own)
            means += [tensor.clone() for tensor in own.values()]
    exchanger.close()
    return [mean.cpu() for mean in means]


def averaging_seldom(rank: int) -> list[Tensor]:
    """Train alone, and average now and then: all at once, in fragments that overlap, and from the host's memory."""
    outer = []
    settings: dict[str, Any]
    for settings in (
        {"compressor": "powersgd"},
        {"compressor": "int8", "fragments": 3, "delay": 2, "mixing": 0.5},
        {"compressor": "top-k:ratio=0.1", "fragments": 2, "delay": 1, "on_host": True},
    ):
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        diloco = commhooks.DiLoCo(model, optimizer, every=4, **settings)
        for step in range(10):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            diloco.step()
            if step == 6:
                with diloco.outer_parameters():
                    outer += [parameter.detach().cpu() for parameter in model.parameters()]
        with diloco.outer_parameters():
            outer += [parameter.detach().cpu() for parameter in model.parameters()]
        assert diloco.statistics().dropped_rounds == 0 < diloco.statistics().rounds
        diloco.close()
    return outer


def adapting(rank: int) -> list[Tensor]:
    """Follow the link from one compressor to another. When is a matter of time, so the parameters are not returned."""
    run = Run(rank)
    attachment = commhooks.attach(run.model, "all-reduce")
    adaptive = Adaptive(attachment, ["all-reduce", "fp16", "powersgd"])
    for step in range(24):
        run.step(step)
        adaptive.step()
    assert len(adaptive.decisions) >= 2
    for parameter in run.model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, parameter)
    attachment.close()
    return []


def hooks_of_pytorch(rank: int) -> list[Tensor]:
    """Run PyTorch's own hooks, alone and within our wrapper."""
    results = []
    for hook in (stock_hooks.fp16_compress_hook, fp16_compress_wrapper(stock_hooks.allreduce_hook)):
        run = Run(rank)
        run.model.register_comm_hook(None, hook)
        for step in range(STEPS):
            run.step(step)
        results += run.parameters()
    return results


def sharded(rank: int) -> list[Tensor]:
    """FSDP2 alone, and with compressors in place of its reduce-scatters and all-gathers."""
    outputs: list[Tensor] = []
    for compressor, gather in ((None, None), ("all-reduce", None), ("int4", None), ("bf16", "int8:block=32")):
        outputs += train_sharded(rank, compressor, gather)
    return outputs


def sharded_apart(rank: int) -> list[Tensor]:
    """Modules that FSDP2 shards in a model that it does not shard: each of them has streams of its own."""
    return train_sharded(rank, "all-reduce", None, apart=True) + train_sharded(rank, "int4", None, apart=True)


def replicas_apart(rank: int) -> list[Tensor]:
    """Replicas of such modules."""
    return train_replicas(rank, "fifo") + train_replicas(rank, "fused")


def steps_of(model: nn.Module, rank: int, steps: int = STEPS, *, set_to_none: bool = False) -> Iterator[None]:
    """Train with a batch of this rank in each step, and yield after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        yield


def outputs_of(model: nn.Module, rank: int, *, set_to_none: bool) -> list[Tensor]:
    """Train, and return what the model makes of the same batch after each step."""
    outputs = []
    for _ in steps_of(model, rank, set_to_none=set_to_none):
        with torch.no_grad():
            outputs.append(model(torch.linspace(-1, 1, 40).view(2, 20).cuda()).cpu())
    return outputs


def replicated(policy: Any) -> tuple[nn.Module, commhooks.Handle[Any]]:
    """Return replicas of a model, whose modules FSDP2 shards apart."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
    model = Net().cuda()
    for root in model.children():
        fully_shard(root, mesh=mesh["shards"])
        root.set_reduce_scatter_max_input_buffers(2)  # type: ignore[operator]  # FSDPModule's
    between = mesh.get_group("replicas")
    return model, commhooks.attach_replicas(model, "all-reduce", process_group=between, policy=policy)


def train_replicas(rank: int, policy: Any) -> list[Tensor]:
    """Return what the whole model makes of one batch after every step, and last the gradients that it keeps aside."""
    model, attachment = replicated(policy)
    outputs = outputs_of(model, rank, set_to_none=policy == "fused")
    for root in model.children():
        root.set_requires_all_reduce(False)  # type: ignore[operator]  # FSDPModule's
    model(torch.linspace(-1, 1, 40).view(2, 20).cuda()).square().mean().backward()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # gradients that were kept are in `.grad` now
        attachment.close()
    named: list[Any] = [*model.parameters()]
    return [*outputs, *(parameter.grad.to_local().cpu() for parameter in named if parameter.grad is not None)]


def sharded_model(*, apart: bool = False) -> nn.Module:
    """Return a model that FSDP2 shards, in three modules, or each of its modules `apart`."""
    model = Net().cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    roots = [*model.children()] if apart else [model]
    for module in (model.first, model.second, *roots[-2:]):
        fully_shard(module, mesh=mesh)
    for root in roots:
        root.set_reduce_scatter_max_input_buffers(2)  # type: ignore[operator]  # FSDPModule's; else FSDP2 waits itself
    return model


def train_sharded(rank: int, compressor: str | None, gather: str | None, *, apart: bool = False) -> list[Tensor]:
    """Return what the whole model makes of the same batch after every step.

    Gradients are set to zero, not freed: FSDP2 makes them on a stream of its own, on which nobody reuses their memory
    before that stream has waited for the optimizer's, which the device cannot know.
    """
    model = sharded_model(apart=apart)
    attachment = None if compressor is None else commhooks.attach_sharded(model, compressor, gather=gather)
    if attachment is None:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
    outputs = outputs_of(model, rank, set_to_none=False)
    if attachment is not None:
        views = [view for unit in attachment.values() for view in unit.engine.buckets.views()]
        assert len({view.memory.untyped_storage().data_ptr() for view in views}) == 1, "one input for all modules"
        attachment.close()
    return outputs


UNORDERED: dict[str, Callable[[int], list[Tensor]]] = {
    "commhooks.engine.engine:mark_of": functools.partial(train_sharded, compressor="all-reduce", gather=None),
    "commhooks.sharded.reducing:mark_of": functools.partial(train_sharded, compressor="all-reduce", gather=None),
    "commhooks.exchange.buckets:mark_of": functools.partial(train_replicas, policy="fifo"),
    "commhooks.sharded.replicas:keep_until_read": functools.partial(train_replicas, policy="fused"),
}
"""What orders streams where FSDP2 reduces, and a program that has a race without it: collectives would not wait for
what they send, or be waited for before the next is filled; memory would be filled or freed while it is read."""
