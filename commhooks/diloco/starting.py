"""Checks of DiLoCo's settings, and their description for the other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from commhooks.communicators.parent_group import group_or_default, name_and_store
from commhooks.diloco.cutting import Arrangement, cut, turns
from commhooks.diloco.inner import OptimizerState, check_is_free
from commhooks.diloco.outer import Outer, OuterSGD, outer_of
from commhooks.diloco.shards import Shards
from commhooks.errors import SettingsError
from commhooks.exchange.checks import checked_compressor
from commhooks.exchange.exchanger import check_takes_weights
from commhooks.exchange.options import is_whole
from commhooks.exchange.watching import optimizer_of
from commhooks.language.compressor import Compressor
from commhooks.tensors import all_finite, computing_dtype, local
from commhooks.units import counted
from commhooks.unwrapping import bare, is_ddp, is_sharded, kept_buffers, plain_name, reshard, unwrapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of exchanges; its fields are arguments of `DiLoCo`."""

    every: int
    delay: int
    mixing: float
    fragments: tuple[tuple[str, ...], ...]
    """The names of each fragment's parameters."""
    optimizer_state: OptimizerState = "local"
    outer: str = "average"
    """The outer optimizer that was chosen: its name or settings, or "own" for a function of the caller's."""

    @property
    def turns(self) -> list[int]:
        """Each fragment's step within a round, counted from 1."""
        return turns(len(self.fragments), self.every)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return vars(self) | {"fragments": [list(names) for names in self.fragments]}

    @property
    def overlaps(self) -> bool:
        """True if one fragment's exchange may begin before another's has ended."""
        own = self.turns
        gaps = [later - earlier for earlier, later in zip(own, [*own[1:], own[0] + self.every], strict=True)]
        return len(own) > 1 and self.delay >= min(gaps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """DiLoCo's arguments, checked on this rank."""

    schedule: Schedule
    named: Mapping[str, Tensor]
    """The trained parameters."""
    buffers: Mapping[str, Tensor]
    shards: Shards
    optimizer: Optimizer
    compressor: Compressor
    outer: Outer
    weighted: bool

    @classmethod
    def checked(
        cls,
        model: Module,
        optimizer: object,
        every: int,
        compressor: Compressor | str,
        outer: Outer | str,
        fragments: int | Sequence[str | Sequence[str]],
        arrangement: Arrangement,
        delay: int,
        mixing: float,
        weighted: bool,
        optimizer_state: OptimizerState,
        group: dist.ProcessGroup | None,
    ) -> Beginning:
        """Return the checked arguments; raise `CommHooksError` if they cannot work on this rank."""
        if not is_whole(every) or every < 1:
            raise SettingsError(f"DiLoCo(every={every!r}): every must be an int of at least 1.")
        if not is_whole(delay) or not 0 <= delay < every:
            raise SettingsError(f"DiLoCo(delay={delay!r}): delay must be an int from 0 to {every - 1}, below every.")
        if not isinstance(mixing, int | float | numpy.floating | numpy.integer) or not 0 <= mixing <= 1:
            raise SettingsError(f"DiLoCo(mixing={mixing!r}): mixing must be a number in [0, 1].")
        if optimizer_state not in get_args(OptimizerState):
            allowed = ", ".join(get_args(OptimizerState))
            raise SettingsError(
                f"DiLoCo(optimizer_state={optimizer_state!r}): optimizer_state must be one of {allowed}."
            )
        if optimizer_state == "mean" and mixing == 1:
            raise SettingsError(
                "DiLoCo(optimizer_state='mean', mixing=1): with a mixing of 1 the optimizer's state stays as it is, as "
                "parameters do, so its mean is of no use; set a mixing below 1, or optimizer_state='local'."
            )
        if not isinstance(model, Module):
            raise SettingsError(f"DiLoCo: model must be a torch.nn.Module (got {type(model).__name__}).")
        reshard(model)  # since a forward pass without a backward pass leaves parameters gathered, which nobody trains
        _check_model(model, group)
        named = trained(bare(model))
        if not named:
            raise SettingsError("DiLoCo: no parameter of the model requires a gradient.")
        found = optimizer_of("DiLoCo", named.values(), optimizer)
        _check_trains(found, named)
        check_is_free(found)
        compressor = checked_compressor("DiLoCo", compressor)
        outer = outer_of(outer, compressor, every)
        if weighted:
            check_takes_weights(compressor)
        parts = cut(named, fragments, arrangement)
        if len(parts) > every:
            raise SettingsError(f"DiLoCo(every={every}): {len(parts)} fragments need at least as many steps.")
        schedule = Schedule(
            every=every,
            delay=delay,
            mixing=float(mixing),
            fragments=tuple(map(tuple, parts)),
            optimizer_state=optimizer_state,
            outer=str(outer) if isinstance(outer, OuterSGD) else "own",
        )
        return cls(
            schedule=schedule,
            named=named,
            buffers=kept_buffers(bare(model)),
            shards=Shards(model),
            optimizer=found,
            compressor=compressor,
            outer=outer,
            weighted=weighted,
        )

    def fingerprint(self) -> str:
        """Return the text that must be the same on every rank."""
        facts = [f"{name}: {value!r}" for name, value in vars(self.schedule).items()]
        facts += [f"compressor: {self.compressor!r}", f"optimizer: {type(self.optimizer).__name__}"]
        facts += [f"weighted: {self.weighted}"]
        for kind, named in (("parameter", self.named), ("buffer", self.buffers)):
            shapes = {name: tuple(local(tensor).shape) for name, tensor in named.items()}
            facts += [f"{kind} {name}: shape {shapes[name]}, {tensor.dtype}" for name, tensor in named.items()]
        return "\n".join([*facts, *self.shards.places()])


def trained(module: Module) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, by their names without wrappers; tied ones once."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def group_of_ranks(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group, or the default one; raise `AttachError` for one whose ranks may change."""
    group = group_or_default(process_group)
    name_and_store(group)
    return group


@torch.no_grad()
def average_over(parameters: Sequence[Tensor], group: dist.ProcessGroup, shards: Shards) -> bool:
    """Overwrite parameters with their means, uncompressed and in at least fp32, over the ranks where all are finite.

    For a sharded model, the shards on all ranks that hold it must be finite. Returns False, changing nothing, if they
    are finite on no rank.
    """
    shards.reshard()
    owned = list(map(local, parameters))
    is_finite = shards.all_agree(bool(all_finite(owned)))
    counting = torch.tensor(float(is_finite), dtype=torch.float32, device=owned[0].device)
    dist.all_reduce(counting, group=group)
    counted = round(float(counting))
    for parameter in owned if counted else ():
        sent = parameter.to(computing_dtype(parameter.dtype)).contiguous() / counted
        if not is_finite:
            sent.zero_()
        dist.all_reduce(sent, group=group)
        parameter.copy_(sent)
    return counted > 0


def _check_model(model: Module, group: dist.ProcessGroup | None) -> None:
    ddp = unwrapped(model)
    shards = Shards(ddp).ranks()
    if is_sharded(ddp) and not shards:
        raise SettingsError(f"DiLoCo: {type(ddp).__name__} shards its parameters; only fully_shard's can be averaged.")
    if group is None:
        if shards:
            raise SettingsError("DiLoCo: workers of one process have whole models; this one is sharded.")
        return
    averaged = set(dist.get_process_group_ranks(group))
    if len(parts := shards & averaged) > 1:
        raise SettingsError(
            f"DiLoCo: ranks {sorted(parts)} keep parts of one model, which have no mean; give DiLoCo a process group "
            "with one rank of each site, those that keep the same part."
        )
    inside = getattr(ddp, "process_group", None) if is_ddp(ddp) else None
    both = averaged & set(dist.get_process_group_ranks(inside) if inside is not None else ())
    if len(both) > 1:
        raise SettingsError(
            f"DiLoCo: the model's DistributedDataParallel averages the gradients of ranks {sorted(both)}, which DiLoCo "
            "is to average too; give DiLoCo the module inside it, or a process group with one rank of each site."
        )


def mismatch(optimizer: Optimizer, named: Mapping[str, Tensor]) -> str:
    """Return a sentence if the optimizer does not train all of these parameters and no others; "" if it does."""
    title = type(optimizer).__name__
    held = {id(one): (group, one) for group, of in enumerate(optimizer.param_groups) for one in of["params"]}
    left_out = [name for name, parameter in named.items() if id(parameter) not in held]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        return (
            f"{left_out[0]!r}{more} requires a gradient, but {title} does not train it. DiLoCo takes one optimizer for "
            "all parameters; freeze those that are not trained."
        )
    known = set(map(id, named.values()))
    strangers = [where for one, where in held.items() if one not in known and where[1].requires_grad]
    if strangers:
        group, first = strangers[0]
        return (
            f"{title} also trains {counted(len(strangers), 'tensor')} that DiLoCo does not exchange, the first of "
            f"shape {tuple(first.shape)} in group {group}: ranks would differ. Make DiLoCo with a model and an "
            "optimizer that have the same parameters."
        )
    return ""


def _check_trains(optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
    """Raise `SettingsError` unless the optimizer trains these parameters, no others, and at the point of evaluation."""
    if wrong := mismatch(optimizer, named):
        raise SettingsError(f"DiLoCo: {wrong}")
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise SettingsError(
            f"DiLoCo: {type(optimizer).__name__} has train() and eval(), as schedule-free optimizers do: it evaluates "
            "at a point that it computes from its own state on each rank, so models would differ there after each "
            "average. As the inner one, use an optimizer whose parameters are evaluated as they are, such as AdamW "
            "with a learning-rate schedule; or average gradients (attach), with which that state is equal on all ranks."
        )
