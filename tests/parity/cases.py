"""THE table: what is trained, how, and which laws it must obey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity import models

Batch = tuple[Any, ...]
BATCH = 4  # examples per rank


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and when a batch is asked for."""

    rank: int
    world_size: int
    step: int

    def generator(self) -> torch.Generator:
        """Return a source of random numbers that differs from rank to rank and step to step."""
        return torch.Generator().manual_seed(1000 * self.step + self.rank)


def vectors(place: Place) -> Batch:
    generator = place.generator()
    return torch.randn(BATCH, 12, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def images(place: Place) -> Batch:
    generator = place.generator()
    return torch.randn(BATCH, 3, 9, 9, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def channels_last_images(place: Place) -> Batch:
    pictures, target = images(place)
    return pictures.contiguous(memory_format=torch.channels_last), target


def tokens(place: Place) -> Batch:
    sequence = torch.randint(30, (BATCH, 9), generator=place.generator())
    return sequence[:, :-1], sequence[:, 1:]


def words(place: Place) -> Batch:
    generator = place.generator()
    return (
        torch.randint(50, (BATCH, 6), generator=generator),
        torch.randint(20, (BATCH, 3), generator=generator),
        torch.randint(5, (BATCH,), generator=generator),
    )


def branches(place: Place) -> Batch:
    """Use one branch that moves from rank to rank, and one that all ranks use in every third step only."""
    x, target = vectors(place)
    return x, [(place.rank + place.step) % 2] + ([2] if place.step % 3 == 0 else []), target


def one_backward(ddp: Any, batches: list[Batch]) -> None:
    """Run one forward and one backward pass a step."""
    for *inputs, target in batches:
        models.cross_entropy(ddp(*inputs), target).backward()


def outputs_backward(ddp: Any, batches: list[Batch]) -> None:
    """Let the loss depend on two of the outputs."""
    for x, target in batches:
        outputs = ddp(x)
        first, second = outputs["pair"]
        (models.cross_entropy(first, target) + second.square().mean() + outputs["rest"][0].square().mean()).backward()


def two_backwards_at_once(ddp: Any, batches: list[Batch]) -> None:
    """Run two forward passes, then one backward pass through both."""
    sum(models.cross_entropy(ddp(x), target) for x, target in batches).backward()  # type: ignore[union-attr]  # 'Item "int" of "Tensor | int" has no attribute "backward"': there are two


def accumulated(ddp: Any, batches: list[Batch]) -> None:
    """Reduce gradients with the last micro-batch alone."""
    for number, (x, target) in enumerate(batches):
        last = number == len(batches) - 1
        with nullcontext() if last or not hasattr(ddp, "no_sync") else ddp.no_sync():
            models.cross_entropy(ddp(x), target).backward()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its data and its way of training."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[Place], Batch] = vectors
    backward: Callable[[Any, list[Batch]], None] = one_backward
    micro_batches: int = 1  # per optimiser step
    options: dict[str, Any] = field(default_factory=dict)  # for DDP
    static: bool = True  # the static-graph form applies
    only_static: bool = False  # PyTorch's class refuses the other form
    local: bool = True  # equal to local training on the joined batch
    sparse: bool = False  # some gradients are sparse: SparseAdam takes AdamW's part for those
    join: bool = False  # rank r leaves after steps - 3 * r


CASES = {
    case.name: case
    for case in (
        Case(name="mlp", model=models.mlp),
        Case(name="cnn with batchnorm", model=models.cnn, batch=images, local=False),
        Case(name="channels-last cnn", model=models.channels_last_cnn, batch=channels_last_images),
        Case(name="transformer, tied weights", model=models.TiedTransformer, batch=tokens),
        Case(name="sparse embedding", model=models.Bag, batch=words, sparse=True, static=False),
        Case(
            name="branches unused on some ranks",
            model=models.Branches,
            batch=branches,
            options={"find_unused_parameters": True},
            static=False,
            local=False,
        ),
        Case(name="several outputs", model=models.Outputs, backward=outputs_backward),
        Case(name="several backward passes", model=models.mlp, micro_batches=3),
        Case(
            name="two forward passes, one backward",
            model=models.mlp,
            backward=two_backwards_at_once,
            micro_batches=2,
            only_static=True,
        ),
        # static=True: PyTorch's class fails an internal assertion when a static graph's first pass is no_sync
        Case(name="gradient accumulation", model=models.mlp, backward=accumulated, micro_batches=3, static=False),
        Case(name="uneven inputs, join", model=models.cnn, batch=images, join=True, static=False, local=False),
        Case(name="mixed fp32 and bf16", model=models.MixedPrecision, local=False),
        Case(name="reentrant checkpoints", model=models.Checkpointed, only_static=True),
        Case(name="odd parameters", model=models.Odd, local=False),
    )
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to wrap and to optimise a case."""

    case: str
    optimizer: str  # "sgd" or "adamw"
    view: bool
    static: bool
    bucket_cap_mb: float | None

    def __str__(self) -> str:
        return (
            f"{self.case} ({self.optimizer}, {'view' if self.view else 'copy'}"
            f"{', static graph' if self.static else ''}, buckets of {self.bucket_cap_mb or 'PyTorch'} MiB)"
        )

    def options(self) -> dict[str, Any]:
        """Return the arguments for DDP."""
        return CASES[self.case].options | {
            "gradient_as_bucket_view": self.view,
            "static_graph": self.static,
            "bucket_cap_mb": self.bucket_cap_mb,
        }


def variants() -> Iterator[Variant]:
    """Yield every case with both optimisers, in copy and view mode, and with a static graph where that applies."""
    for case in CASES.values():
        forms = [True] if case.only_static else [False, True] if case.static else [False]
        for static in forms:
            for view in (False, True):
                for optimizer in ("sgd", "adamw"):
                    # a few KiB make several buckets of these small models; PyTorch's own sizes make one
                    cap = None if optimizer == "adamw" and not view else 0.002
                    yield Variant(case=case.name, optimizer=optimizer, view=view, static=static, bucket_cap_mb=cap)


def joined(batches: list[Batch]) -> Batch:
    """Return the ranks' batches as one."""
    return tuple(torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*batches, strict=True))
