"""Train a variant with one class or another, keep every step's parameters, and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity.cases import CASES, Batch, Case, Place, Variant, joined

State = dict[str, Tensor]
Hook = Callable[[Any, Any], Any]


def ddp_class(which: str | type[nn.Module]) -> Callable[..., nn.Module]:
    """Return the class called "ours" or "torch", or a class itself."""
    if not isinstance(which, str):
        return which
    if which == "torch":
        return nn.parallel.DistributedDataParallel
    import ddp_core

    return ddp_core.DistributedDataParallel


def compare(rank: int, variants: Sequence[Variant], first: str, second: str, steps: int) -> list[str]:
    """Train every variant with two classes in turn; return what differed, in words."""
    complaints = []
    for variant in variants:
        try:
            histories = [train(rank, variant, which, steps) for which in (first, second)]
        except Exception as error:
            error.add_note(f"while training {variant}")
            raise
        difference = first_difference(*histories)
        if difference:
            complaints.append(f"{variant}: {difference}")
    return complaints


def first_difference(one: list[State], other: list[State]) -> str | None:
    """Return where two histories diverge: the first step, and the first tensor in it, whose bits differ."""
    if len(one) != len(other):
        return f"{len(one)} steps against {len(other)}"
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        for name in a:
            if not torch.equal(a[name], b[name]):
                worst = (a[name].double() - b[name].double()).abs().max().item()
                return f"step {step}: {name!r} differs by up to {worst:.3g}"
    return None


def new_model(case: Case, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the case's model, the same one on every rank and every time."""
    torch.manual_seed(7)
    return case.model() if dtype == torch.float32 else case.model().to(dtype)


def train(
    rank: int,
    variant: Variant,
    which: str | type[nn.Module],
    steps: int,
    hook: Callable[[], tuple[object, Hook]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[State]:
    """Return the parameters and buffers after every step, and once more at the end."""
    case = CASES[variant.case]
    model = new_model(case, dtype)
    ddp: Any = ddp_class(which)(model, **variant.options())
    if hook is not None:
        ddp.register_comm_hook(*hook())
    optimizers = make_optimizers(variant.optimizer, model, case)
    history: list[State] = []
    with ddp.join() if case.join else nullcontext():
        for step in range(steps - 3 * rank if case.join else steps):
            batches = micro_batches(case, rank, dist.get_world_size(), step)
            run_step(case, ddp, optimizers, cast_batches(batches, dtype))
            history.append(snapshot(model))
    history.append(snapshot(model))
    return history


def compare_with_local(rank: int, cases: Sequence[str], optimizer: str, steps: int, tolerance: float) -> list[str]:
    """Train cases with our class, and the bare model on the joined batches; return where they are too far apart.

    In float64, so that what steps multiply rounding by does not show.
    """
    complaints = []
    dtype = torch.float64
    for number, name in enumerate(cases):
        static = CASES[name].only_static
        variant = Variant(case=name, optimizer=optimizer, view=number % 2 == 0, static=static, bucket_cap_mb=0.002)
        *distributed, _ = train(rank, variant, "ours", steps, dtype=dtype)
        if rank == 0:
            local = train_locally(CASES[name], optimizer, dist.get_world_size(), steps, dtype)
            worst = max(_distance(a, b) for a, b in zip(local, distributed, strict=True))
            if not worst <= tolerance:
                complaints.append(f"{variant}: parameters differ by up to {worst:.3g}")
    return complaints


def _distance(one: State, other: State) -> float:
    """Return the largest difference of a parameter's elements, relative to its largest element where that is over 1."""
    parameters = [name for name in one if not name.endswith(".grad") and one[name].numel()]
    return max(
        ((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=1)).item() for name in parameters
    )


def train_locally(case: Case, optimizer: str, world_size: int, steps: int, dtype: torch.dtype) -> list[State]:
    """Train the bare model on the joined batches of all ranks."""
    model = new_model(case, dtype)
    optimizers = make_optimizers(optimizer, model, case)
    history = []
    for step in range(steps):
        by_rank = [micro_batches(case, rank, world_size, step) for rank in range(world_size)]
        run_step(
            case, model, optimizers, cast_batches([joined(list(parts)) for parts in zip(*by_rank, strict=True)], dtype)
        )
        history.append(snapshot(model))
    return history


def micro_batches(case: Case, rank: int, world_size: int, step: int) -> list[Batch]:
    """Return the batches of one optimiser step of one rank."""
    first = step * case.micro_batches
    places = (Place(rank=rank, world_size=world_size, step=first + number) for number in range(case.micro_batches))
    return [case.batch(place) for place in places]


def cast_batches(batches: list[Batch], dtype: torch.dtype) -> list[Batch]:
    """Return the batches with their floating-point tensors in `dtype`."""
    if dtype == torch.float32:
        return batches
    return [tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in b) for b in batches]


def run_step(case: Case, ddp: Any, optimizers: list[torch.optim.Optimizer], batches: list[Batch]) -> None:
    """Take one optimiser step."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    case.backward(ddp, batches)
    for optimizer in optimizers:
        optimizer.step()


def make_optimizers(name: str, model: nn.Module, case: Case) -> list[torch.optim.Optimizer]:
    """Return SGD with momentum or AdamW over all parameters but those with sparse gradients.

    Those get plain SGD (a sparse momentum grows by a gradient a step) or SparseAdam. What is zero but for its rounding,
    as an attention's key bias is, moves by no more than that over eps.
    """
    sparse = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    dense = [p for p in model.parameters() if all(p is not other for other in sparse)]
    optimizers: list[torch.optim.Optimizer]
    if name == "sgd":
        optimizers = [
            torch.optim.SGD(dense, lr=0.05, momentum=0.9),
            torch.optim.SGD(sparse or [torch.empty(0)], lr=0.05),
        ]
    else:
        settings: dict[str, Any] = {"lr": 0.01, "eps": 1e-4}
        optimizers = [
            torch.optim.AdamW(dense, **settings),
            torch.optim.SparseAdam(sparse or [torch.empty(0)], **settings),
        ]
    return optimizers if case.sparse else optimizers[:1]


def snapshot(model: nn.Module) -> State:
    """Return a copy of all parameters and buffers, and of the gradients, which show a difference a step earlier."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            state[f"{name}.grad"] = copy.copy(parameter.grad.detach().to_dense().clone())
    return state
