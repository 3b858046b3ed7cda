"""Branches that come and go, ranks that run out of inputs, layers that are unfrozen."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

import commhooks
from commhooks import Handle, PowerSGDState
from commhooks.language.loss import error_of
from commhooks.saving.saved import Saved
from tests import bounds
from tests.cases import BY_NAME
from tests.commhooks.models import wrap
from tests.commhooks.workers import largest, normal, zeros
from tests.ddp_core.facts import BOTH_DDPS, Facts

facts = Facts(kinds=BOTH_DDPS)
WAYS = (
    ("fifo", "powersgd-2"),
    ("fused", "powersgd-2"),
    ("hook", "powersgd-2"),
    ("fifo", "powersgd-2-fp16-wire"),
    ("fused", "powersgd-2-alternating"),
    ("fifo", "fp16-feedback"),
)
"""Policies, or PyTorch's way to register a hook; and rows of the table. A world tries them on one model after another:
starting and ending it takes longer."""
SHAPES = [(30, 50), (40, 30), (24, 24), (50,)]
BRANCHES = {"bucket_cap_mb": 0.004}


class Branches(nn.Module):
    """A model of which each forward pass uses some parameters; their gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, gradients: dict[int, Tensor]) -> Tensor:
        return torch.stack([(self.weights[i] * gradient).sum() for i, gradient in gradients.items()]).sum()


def _own(hooks: Handle[Any] | PowerSGDState, rank: int, number: int) -> dict[str, Tensor]:
    state = hooks.state_dict()
    name = f"weights.{number}"
    kept: dict[str, Tensor] = state["local"][f"rank{rank}"].get(name, {}) | state["replicated"].get(name, {})
    return kept


def _hooked(kind: str, how: Any, case: str, **settings: Any) -> tuple[nn.Module, Handle[Any] | PowerSGDState]:
    model = wrap(kind, Branches(), **(BRANCHES | settings))
    if how != "hook":
        return model, commhooks.attach(model, BY_NAME[case].make(), policy=how)
    state = PowerSGDState(None, 2, start_powerSGD_iter=0)
    state.bind(model)
    model.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]
    return model, state


@facts
def a_parameter_that_no_rank_uses_keeps_its_state_and_nothing_is_lost(rank: int, kind: str) -> None:
    for how, case in WAYS:
        leave_some_unused(rank, kind, how, case)


def leave_some_unused(rank: int, kind: str, how: str, case: str) -> None:
    """Use other branches in each step; what no rank uses keeps its state, and no residual is lost."""
    model, hooks = _hooked(kind, how, case, find_unused_parameters=True)
    wanted = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]  # the sum of the means of all gradients
    got = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    rounding = torch.zeros(len(SHAPES), dtype=torch.float64)  # no other rank's, which may be larger
    for step in range(12):
        used_by = [{0, 3}, {0, 2, 3}] if step % 3 else [{0, 1, 3}, {0, 1, 3}]
        gradients = normal(zeros(*SHAPES), 2, seed=step)
        before = [_own(hooks, rank, number) for number in range(len(SHAPES))]
        model.zero_grad()
        model({number: gradients[rank][number] for number in sorted(used_by[rank])}).backward()
        for number, parameter in enumerate(model.module.weights):  # type: ignore[union-attr, arg-type]
            contributions = [gradients[r][number] for r in range(2) if number in used_by[r]]
            if not contributions:
                assert parameter.grad is None, (step, number)
                after = _own(hooks, rank, number)
                assert all(torch.equal(before[number][entry], after[entry]) for entry in before[number]), (step, number)
                assert before[number].keys() == after.keys() or step == 0
                continue
            wanted[number] += torch.stack(contributions).double().sum(0) / 2
            to_send = gradients[rank][number] + before[number].get("residual", torch.zeros(()))
            rounding[number] += bounds.of_conservation([to_send] * 2, BY_NAME[case].rank, wire=BY_NAME[case].wire)
            got[number] += parameter.grad.double()
    owed = [_own(hooks, rank, number).get("residual", torch.zeros(shape)) for number, shape in enumerate(SHAPES)]
    mean_owed = [_mean_over_ranks(one.double()) for one in owed]
    of_both = 2 * _mean_over_ranks(rounding)
    for number in range(len(SHAPES)):
        assert largest(wanted[number] - got[number] - mean_owed[number]) <= of_both[number], number
        loss = BY_NAME[case].make().loss(f"weights.{number}", torch.zeros(SHAPES[number]))
        least = 0.1 if error_of(loss) > 0.01 else 0.0
        assert (loss is None) is not bool(mean_owed[number].abs().max() > least), number


def _mean_over_ranks(tensor: Tensor) -> Tensor:
    torch.distributed.all_reduce(tensor)
    return tensor / 2


@facts
def a_rank_that_has_joined_takes_part_with_zeros_and_keeps_what_it_owes(rank: int, kind: str) -> None:
    for how, case in WAYS:
        run_out_of_inputs(rank, kind, how, case)


def run_out_of_inputs(rank: int, kind: str, how: str, case: str) -> None:
    """Let rank 0 run out of inputs; it takes part with zeros, and keeps its residual."""
    model, hooks = _hooked(kind, how, case)
    inputs = [4, 9]
    kept: dict[int, dict[str, Tensor]] = {}
    trained_on: list[Tensor] = []
    with model.join():  # type: ignore[operator]
        for step in range(inputs[rank]):
            gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
            model.zero_grad()
            model(dict(enumerate(gradients))).backward()
            if step == inputs[0] - 1:
                kept = {number: _own(hooks, rank, number) for number in range(len(SHAPES))}
            trained_on = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = hooks.state_dict()
    assert state["step"] == inputs[1]
    moved = 0
    for number in range(len(SHAPES)):
        own = _own(hooks, rank, number)
        if "residual" in own and number != 3:
            assert torch.equal(own["residual"], kept[number]["residual"]) is (rank == 0), number
            moved += 1
    assert moved == 3 and all(torch.isfinite(g).all() for g in trained_on)
    assert _replicated_digest(state) == _replicated_digest(_of_rank_0(state))


@facts
def a_step_that_is_undone_leaves_a_rank_that_has_joined_what_it_owes(rank: int, kind: str) -> None:
    for policy, matrices in itertools.product(("fifo", "fused"), ("first-dimension", "whole-bucket")):
        undo_after_joining(rank, kind, policy, matrices)


def undo_after_joining(rank: int, kind: str, policy: Any, matrices: Any) -> None:
    """Let rank 0 join, then put an inf into a run with atomic steps: no state changes any more."""
    model = wrap(kind, Branches(), **BRANCHES)
    hooks = commhooks.attach(
        model, commhooks.make_compressor("powersgd", rank=2, matrices=matrices), policy=policy, atomic=True
    )
    kept: list[dict[str, Tensor]] = []
    with model.join():  # type: ignore[operator]
        for step in range(5 if rank else 3):
            gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
            if step >= 3:
                gradients[2].view(-1)[0] = torch.inf
            model.zero_grad()
            model(dict(enumerate(gradients))).backward()
            if step == 2:
                kept = [_own(hooks, rank, number) for number in range(len(SHAPES))]
    assert hooks.state_dict()["step"] == 5
    for number, before in enumerate(kept):
        after = _own(hooks, rank, number)
        assert before.keys() == after.keys() and (number == 3 or before["residual"].abs().max() > 0)
        assert all(torch.equal(before[entry], after[entry]) for entry in before), number


@facts
def a_rank_that_has_joined_keeps_what_it_owes_when_buckets_are_cut(rank: int, kind: str) -> None:
    """Let rank 0 join after the first step, where residuals are laid out for other buckets: it keeps its residual."""
    model = wrap(kind, Branches(), **BRANCHES)
    hooks = commhooks.attach(model, commhooks.make_compressor("powersgd", rank=2, matrices="whole-bucket"))
    kept: list[Tensor] = []
    with model.join():  # type: ignore[operator]
        for step in range(3 if rank else 1):
            model.zero_grad()
            model(dict(enumerate(normal(zeros(*SHAPES), 2, seed=step)[rank]))).backward()
            kept = kept or [residual.clone() for *_, residual in hooks.state.residuals()]
    assert len(kept) == len(SHAPES)
    assert all(torch.equal(a, b) for (*_, a), b in zip(hooks.state.residuals(), kept, strict=True)) is (rank == 0)


def _replicated_digest(state: dict[str, Any]) -> str:
    return Saved.from_dict(state).digest()


def _of_rank_0(state: dict[str, Any]) -> dict[str, Any]:
    told: list[Any] = [state]
    torch.distributed.broadcast_object_list(told, src=0)
    received: dict[str, Any] = told[0]
    return received


test = facts.tests()
