"""Short runs of the CUDA code on the virtual device, right as they are, in which mutants are found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import commhooks
from commhooks.exchange.metrics import metrics_of
from commhooks.language import Entry
from commhooks.saving.resumption import snapshot_of
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import normal, zeros
from tests.virtual_device.worlds import DeviceWorld, steps

SHAPES: list[Shape] = [(24, 40), (30, 20), (40,), (20, 24), (7,)]
GRADIENTS = [normal(zeros(*SHAPES), 2, seed=step) for step in range(3)]
"""Of each step, rank and parameter."""
DEVICES = "commhooks/devices.py"
"""Where hooks wait for copies into the host's memory, which the GPU guide permits."""


@dataclass(frozen=True)
class Scenario:
    """A program that returns what it computes, and the files in which the host waits for the device."""

    name: str
    program: Callable[[], list[Tensor]]
    waits_in: tuple[str, ...] = ()


def _world(compressor: str = "powersgd", world_size: int = 2, settings: Any = None, **of_engine: Any) -> DeviceWorld:
    made = commhooks.make_compressor(compressor, **(settings or {}))
    return DeviceWorld(made, world_size, SHAPES, buckets=2, **of_engine)


def _changed(changes: dict[tuple[int, int, int], float]) -> list[list[list[Tensor]]]:
    """Return the gradients times so much, for (step, rank, parameter)."""
    return [
        [[g * changes.get((step, rank, i), 1.0) for i, g in enumerate(own)] for rank, own in enumerate(given)]
        for step, given in enumerate(GRADIENTS)
    ]


def _announce(world: DeviceWorld, step: int) -> None:
    for engine in world.engines:
        engine.loss_scale.announce(2.0**step)


def _atomic_rounds() -> list[Tensor]:
    """Hand every step in before the means of the one before are waited for, in memory of its own."""
    world, under_way = _world(atomic=True), []
    try:
        for given in _changed({(1, 1, 2): torch.inf}):
            world.memories = [[torch.empty_like(memory) for memory in own] for own in world.memories]
            under_way.append(world.submit(given))
        return [mean for futures in under_way for own in world.means(futures) for mean in own] + world.state()
    finally:
        world.stop()


def _load(world: DeviceWorld) -> None:
    """Load residuals of the matrices, in bf16 as after a run with `residuals="bf16"`."""
    for engine, parameters in zip(world.engines, world.parameters, strict=True):
        own = {
            f"layer{i}": {"residual": torch.full((p.numel(),), 3.0, dtype=torch.bfloat16, device=p.device)}
            for i, p in enumerate(parameters)
            if p.dim() == 2
        }
        engine.state.load({}, own, {name: {"residual": Entry(kind="residual")} for name in own})


def _loaded_on_own_stream() -> list[Tensor]:
    default, own = torch.cuda.default_stream(0), torch.cuda.Stream(0)

    def load_elsewhere(world: DeviceWorld, step: int) -> None:
        torch.cuda.set_stream(default)
        if step == 0:
            _load(world)
        own.wait_stream(default)
        torch.cuda.set_stream(own)

    try:
        return steps(lambda: _world(world_size=1), GRADIENTS, load_elsewhere)
    finally:
        torch.cuda.set_stream(default)


def _host_saved() -> list[Tensor]:
    """Save after every step, while device 0 is the current one of both ranks."""
    world, found = _world("top-k", storage="host"), []
    try:
        for given in GRADIENTS:
            means = world.step(given)
            for engine in world.engines:
                saved = snapshot_of(engine, {}).local[engine.connection.rank].values()
                found += [kept.clone() for entries in saved for kept in entries.values()]
            found += [mean for own in means for mean in own]
        return [*found, *world.state()]
    finally:
        world.stop()


def _saved_under_way() -> list[Tensor]:
    """Save state on the device while a round is under way, as between `Exchanger.begin` and `Averaging.write`."""
    world, found = _world(world_size=1), []
    try:
        for given in GRADIENTS:
            under_way = world.submit(given)
            (engine,) = world.engines
            saved = snapshot_of(engine, {})
            entries = [*saved.local[0].values(), *saved.replicated.values()]
            found += [kept.clone() for own in entries for kept in own.values()]
            found += [mean for own in world.means(under_way) for mean in own]
        return [*found, *world.state()]
    finally:
        world.stop()


def _replace(world: DeviceWorld, step: int) -> None:
    for rank, engine in enumerate(world.engines if step == 2 else ()):
        engine.replace(commhooks.make_compressor("powersgd"), torch.device("cuda", rank))


def _host_metrics() -> list[Tensor]:
    """Return the metrics after each step, too."""
    world, found = _world("top-k", storage="host"), []
    try:
        for given in GRADIENTS:
            for engine, parameters, means in zip(world.engines, world.parameters, world.step(given), strict=True):
                for parameter, mean in zip(parameters, means, strict=True):
                    parameter.grad = mean
                metrics = metrics_of([engine], engine.statistics(), engine.channel.ledger.last_step(), {})
                found += [torch.tensor(metrics["commhooks/residual_norm_over_gradient_norm"]), *means]
        return [*found, *world.state()]
    finally:
        world.stop()


def _two_channels() -> list[Tensor]:
    """Let the two models share a connection, of one rank, which need not wait for the others' turns."""
    first = _world("top-k", world_size=1)
    return _beside_each_other([first, _world("top-k", world_size=1, beside=first)], [*GRADIENTS, *GRADIENTS])


def _beside_each_other(models: Sequence[DeviceWorld], gradients: Sequence[Any] = GRADIENTS) -> list[Tensor]:
    found: list[Tensor] = []
    try:
        for given in gradients:
            other = [[-3 * gradient for gradient in own] for own in given]
            under_way = [model.submit(own) for model, own in zip(models, (given, other), strict=True)]
            for model, futures in zip(models, under_way, strict=True):
                found += [mean for own in model.means(futures) for mean in own]
        return [*found, *(kept for model in models for kept in model.state())]
    finally:
        for model in models:
            model.stop()


def _through_ddp(
    hook: str = "", used: Sequence[int] = (5, 5, 5), device: str = "cuda:0", **settings: bool
) -> list[Tensor]:
    """Train through ddp_core with real backward passes, over NCCL with one rank; steps use the first parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this PyTorch has no NCCL; and one rank is told that compression saves nothing
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        model = wrap("core", _Given(*SHAPES).to(device), bucket_cap_mb=0.004, **settings)
        attachment = commhooks.attach(model, hook, policy="fifo") if hook else None
    try:
        found = []
        for given, number in zip(GRADIENTS, used, strict=True):
            model.zero_grad()
            model(*[gradient.to(device, non_blocking=True) for gradient in given[0][:number]]).backward()
            found += gradients_of(model)
        torch.cuda.synchronize(device)
        if attachment is not None:
            attachment.close()
        return found
    finally:
        dist.destroy_process_group()


class _Given(Given):
    """Whose `forward` uses as many parameters as it is given gradients."""

    def forward(self, *gradients: Tensor) -> Tensor:
        terms = [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=False)]
        return torch.stack(terms).sum()


PLAIN = Scenario("steps", lambda: steps(_world, GRADIENTS))
FUSED = Scenario("fused steps", lambda: steps(lambda: _world(policy="fused"), GRADIENTS))
CODES = Scenario("steps of int8", lambda: steps(lambda: _world("int8"), GRADIENTS))
ALONE = Scenario("steps of one rank, atomic", lambda: steps(lambda: _world(world_size=1, atomic=True), GRADIENTS))
ALONE_ON_HOST = Scenario(
    "steps of one rank, residuals on the host",
    lambda: steps(lambda: _world("top-k", world_size=1, storage="host"), GRADIENTS),
)
COLD = Scenario("steps without warm start", lambda: steps(lambda: _world(settings={"warm_start": False}), GRADIENTS))
ATOMIC = Scenario("atomic steps", lambda: steps(lambda: _world(atomic=True), _changed({(1, 1, 2): torch.inf})))
ATOMIC_ROUNDS = Scenario("atomic steps, several under way", _atomic_rounds)
HOST_LOSS_SCALE = Scenario(
    "residuals on the host, a loss scale that changes",
    lambda: steps(lambda: _world(storage="host"), GRADIENTS, _announce),
    (DEVICES,),
)
HOST_ATOMIC = Scenario(
    "residuals on the host, atomic",
    lambda: steps(lambda: _world(storage="host", atomic=True), _changed({(1, 1, 2): torch.inf})),
    (DEVICES,),
)
HOST_JOINED = Scenario(
    "residuals on the host, a rank that has joined",
    lambda: steps(
        lambda: _world(storage="host", may_join=True), _changed(dict.fromkeys([(1, 1, i) for i in range(5)], 0.0))
    ),
    (DEVICES, "commhooks/engine/guards.py"),
)
HOST_UNUSED = Scenario(
    "residuals on the host, unused parameters",
    lambda: steps(
        lambda: _world(storage="host", may_be_unused=True), _changed(dict.fromkeys([(1, 0, 0), (1, 1, 0)], 0.0))
    ),
)
HOST_LOADED = Scenario(
    "residuals on the host, state loaded",
    lambda: steps(lambda: _world(storage="host"), GRADIENTS, lambda world, step: _load(world) if step == 1 else None),
    (DEVICES, "commhooks/state/table.py"),
)
LOADED = Scenario("state loaded, hooks called on the user's stream", _loaded_on_own_stream)
SAVED_UNDER_WAY = Scenario("state saved while a round is under way", _saved_under_way)
HOST_SAVED = Scenario("residuals on the host, state saved", _host_saved, (DEVICES,))
HOST_REPLACED = Scenario(
    "residuals on the host, the compressor replaced",
    lambda: steps(lambda: _world("int8", storage="host"), GRADIENTS, _replace),
    (DEVICES,),
)
HOST_METRICS = Scenario("residuals on the host, metrics", _host_metrics, (DEVICES, "commhooks/exchange/metrics.py"))
TWO_MODELS = Scenario(
    "two models of one shape", lambda: _beside_each_other([_world("top-k", dtype=torch.bfloat16) for _ in range(2)])
)
TWO_CHANNELS = Scenario("two channels of a connection", _two_channels)
_BEFORE_THE_FIRST_HOOK = ("ddp_core/replicas.py", "ddp_core/buckets.py", "commhooks/communicators/private_group.py")
DDP = Scenario("backward passes through ddp_core", lambda: _through_ddp(hook="powersgd"), _BEFORE_THE_FIRST_HOOK)
DDP_ELSEWHERE = Scenario(
    "the same on a device that is not the current one",
    lambda: _through_ddp(hook="powersgd", device="cuda:1"),
    _BEFORE_THE_FIRST_HOOK,
)
DDP_ALONE = Scenario(
    "backward passes through ddp_core, no hook, unused parameters",
    lambda: _through_ddp(used=(5, 3, 5), find_unused_parameters=True),
    ("ddp_core/replicas.py", "ddp_core/features/unused.py"),
)

SCENARIOS: Sequence[Scenario] = [value for value in list(globals().values()) if isinstance(value, Scenario)]
