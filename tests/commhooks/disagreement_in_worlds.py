"""What the tests of ranks that disagree run on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import ErrorFeedback, PowerSGD, SettingsError, make_compressor
from tests import bounds
from tests.commhooks.inline_on_cpu import as_on_nccl
from tests.commhooks.mirrored import SHAPES, TINY_BUCKETS, Mirrored, backward, largest_error
from tests.commhooks.models import Given, wrap
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import largest, normal, zeros


class Renamed(Given):
    """Call the parameters something else."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("weights.2", "head"), parameter


@contextlib.contextmanager
def frozen(parameter: Tensor) -> Iterator[None]:
    """Freeze a parameter."""
    parameter.requires_grad_(False)
    yield
    parameter.requires_grad_(True)


@contextlib.contextmanager
def with_data(parameter: Tensor, data: Tensor) -> Iterator[None]:
    """Put other data into a parameter, as `model.module.double()` or a transposition does after wrapping.

    Neither DDP can train afterwards, whatever is put back.
    """
    own, parameter.data = parameter.data, data
    yield
    parameter.data = own


ODD = 1
"""The rank that differs, in what rank 0 and the others have."""
ATTACHED: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "compressor": (("fp16", "fifo"), ("bf16", "fifo")),
    "rank": (("rank 1", "fifo"), ("rank 2", "fifo")),
    "seed": (("rank 1", "fused"), ("rank 1, seed 1", "fused")),
    "policy": (("rank 1", "fifo"), ("rank 1", "fused")),
}
COMPRESSORS = {
    "fp16": make_compressor("fp16"),
    "bf16": make_compressor("bf16"),
    "rank 1": make_compressor("powersgd", rank=1),
    "rank 2": make_compressor("powersgd", rank=2),
    "rank 1, seed 1": make_compressor("powersgd", rank=1, seed=1),
}


def refused_attachments(rank: int, kind: str) -> dict[str, Told]:
    """Attach what differs on one rank, in one thing at a time; then attach the same, and train."""
    odd = rank == ODD
    module = (Renamed if odd else Given)(*SHAPES)
    model = wrap(kind, module, **TINY_BUCKETS)
    told = {"name": told_by(lambda: commhooks.attach(model, "fp16"))}
    module.named_parameters = functools.partial(nn.Module.named_parameters, module)  # type: ignore[method-assign]
    for what, ours in ATTACHED.items():
        name, policy = ours[odd]
        attach = functools.partial(commhooks.attach, model, COMPRESSORS[name], policy=policy)
        told[what] = told_by(attach)
    spoilt = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
    weight, other = (list(one.parameters())[2] for one in (model, spoilt))
    changes: dict[str, tuple[nn.Module, Any]] = {
        "frozen": (model, frozen(weight)),
        "shape": (spoilt, with_data(other, other.data.t())),
        "dtype": (spoilt, with_data(other, other.data.double())),
    }
    for what, (changed, change) in changes.items():
        with change if odd else contextlib.nullcontext():
            told[what] = told_by(functools.partial(commhooks.attach, changed, "fp16"))
    attachment = commhooks.attach(model, "all-reduce")
    for step in range(3):
        gradients = normal(zeros(*SHAPES), dist.get_world_size(), seed=step)
        expected = [torch.stack(of_ranks).double().mean(0) for of_ranks in zip(*gradients, strict=True)]
        rounding = bounds.of_mean(len(gradients), torch.float32) * largest(*(g for own in gradients for g in own))
        assert largest_error(backward(model, gradients[rank]), expected) <= rounding
    assert attachment.steps == 3
    attachment.detach()
    return told


def refused_replacements(rank: int, kind: str, policy: str) -> dict[str, Told]:
    """Replace by what differs on one rank; the old compressor must go on as if nothing had happened."""
    both = Mirrored(kind, make_compressor("powersgd", rank=2), policy)
    told = {}
    for step, (what, names) in enumerate(
        {"compressor": ("fp16", "bf16"), "rank": ("rank 1", "rank 2"), "seed": ("rank 1", "rank 1, seed 1")}.items()
    ):
        _demand_the_means_of_lockstep(both, step)
        old = both.attachment.compressor
        replace = functools.partial(both.attachment.replace, COMPRESSORS[names[rank == ODD]])
        told[what] = told_by(replace)
        assert both.attachment.compressor is old
    for step in (3, 4):
        _demand_the_means_of_lockstep(both, step)
    both.replace(make_compressor("powersgd", rank=4))
    _demand_the_means_of_lockstep(both, 5)
    both.attachment.detach()
    return told


def _demand_the_means_of_lockstep(both: Mirrored, step: int) -> None:
    ours, expected = both.step(normal(zeros(*SHAPES), 2, seed=step))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), (step, largest_error(ours, expected))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Particular(PowerSGD):
    """Have the same settings on every rank, and refuse the model on one of them."""

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        if dist.get_rank() == ODD:
            raise SettingsError("Particular: 'head.*' is missing on this rank.")


def refused_by_one(rank: int, kind: str, when: str) -> list[Told]:
    """Name a nonexistent parameter on one rank; then attach, or go on, as if nothing had happened.

    Attach also as on NCCL, where the group's own collectives carry what ranks agree on.
    """
    model = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
    compressor = make_compressor("powersgd", rank=2, skip=("head.*",) if rank == ODD else ())
    gradients = normal(zeros(*SHAPES), 2, seed=0)
    if when == "attach":
        told = [told_by(functools.partial(commhooks.attach, model, compressor))]
        with as_on_nccl():
            told.append(told_by(functools.partial(commhooks.attach, model, ErrorFeedback(inner=Particular(rank=2)))))
        attachment = commhooks.attach(model, "all-reduce")
    else:
        attachment = commhooks.attach(model, "all-reduce")
        backward(model, gradients[rank])
        told = [told_by(functools.partial(attachment.replace, compressor))]
    expected = [(a + b) / 2 for a, b in zip(*gradients, strict=True)]
    assert largest_error(backward(model, gradients[rank]), expected) == 0  # halves lose no bit, at any time
    attachment.detach()
    return told


POWERSGD, BATCHED = commhooks.powerSGD_hook, commhooks.batched_powerSGD_hook
BARE: dict[str, tuple[tuple[dict[str, Any], Any], tuple[dict[str, Any], Any]]] = {
    "rank": (({}, POWERSGD), ({"matrix_approximation_rank": 2}, POWERSGD)),
    "seed": (({}, POWERSGD), ({"random_seed": 7}, POWERSGD)),
    "warm-up": (({}, POWERSGD), ({"start_powerSGD_iter": 5}, POWERSGD)),
    "policy": (({}, POWERSGD), ({"policy": "fused"}, POWERSGD)),
    "matrices": (({}, POWERSGD), ({}, BATCHED)),
    "wire": (({}, POWERSGD), ({}, commhooks.fp16_compress_wrapper(POWERSGD))),
}


def refused_bare_hooks(rank: int, kind: str) -> dict[str, tuple[Told, Told]]:
    """Register PowerSGD with a state that differs on one rank; return what two backward passes raise."""
    told = {}
    for what, ours in BARE.items():
        settings, hook = ours[rank == ODD]
        model = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
        state = commhooks.PowerSGDState(None, **settings)
        model.register_comm_hook(state, hook)  # type: ignore[operator]  # 'Tensor not callable'
        gradients = normal(zeros(*SHAPES), dist.get_world_size(), seed=0)[rank]
        step = functools.partial(backward, model, gradients)
        told[what] = (told_by(step), told_by(step))
    return told
