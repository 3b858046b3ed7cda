"""What laws on the device are crossed with: rows, orders of collectives, kinds of residuals, guards and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.engine.engine import Engine
from commhooks.state.table import RESIDUAL_STORAGES
from commhooks.wrappers.hierarchical import is_hierarchical
from tests.cases import BY_NAME, CASES, Case
from tests.commhooks.models import Shape
from tests.commhooks.workers import normal, zeros

SHAPES: list[Shape] = [(24, 40), (40,), (24, 40), (6, 5, 3, 3), (7,), ()]
"""Dealt out to two buckets, each with a matrix, and one with two that are stacked."""
BUCKETS = 2
WORLD_SIZE = 2
UNUSED = 2
"""The parameter that nobody uses in step 1."""
RUNS = ("late", "random:1")

ROWS = [case.name for case in CASES if not is_hierarchical(case.make())]
"""Over NCCL there are no groups of some of the ranks."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A row, and what is asked of its engine."""

    row: str
    policy: Any
    residuals: Any
    atomic: bool = False
    """A step in which rank 0 has an inf is undone."""
    unused: bool = False
    """A parameter has no gradient in one step."""
    joins: bool = False
    """The last rank has run out of inputs in one step."""
    rescaled: bool = False
    """A gradient scaler doubles the loss scale after the first step."""

    def __str__(self) -> str:
        guards = [name for name in GUARDS if getattr(self, name)]
        return "-".join([self.row, self.policy, self.residuals, *guards])

    @property
    def is_guarded(self) -> bool:
        """Whether any guard is on."""
        return any(getattr(self, name) for name in GUARDS)

    @property
    def case(self) -> Case:
        """The row."""
        return BY_NAME[self.row]

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients: fp64 for products of matrices, which differ from those on the CPU by rounding."""
        return torch.float64 if self.case.rank else torch.float32

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `Engine`."""
        return {"atomic": self.atomic, "may_be_unused": self.unused, "may_join": self.joins}

    def gradients(self) -> list[list[list[Tensor]]]:
        """Return gradients[step][rank][parameter], on the CPU."""
        steps = [normal(zeros(*SHAPES, dtype=self.dtype), WORLD_SIZE, seed=step) for step in range(3 + self.atomic)]
        if self.unused:
            for own in steps[1]:
                own[UNUSED].zero_()
        if self.joins:
            for gradient in steps[1][-1]:
                gradient.zero_()
        if self.atomic:
            steps[2][0][0][0, 0] = torch.inf
        return steps

    def before_step(self, engines: Sequence[Engine], scalers: Sequence[torch.amp.GradScaler], step: int) -> None:
        """Let the engines follow their scalers, and double the scale before step 1."""
        if not self.rescaled:
            return
        for engine, scaler in zip(engines, scalers, strict=True):
            if step == 0:
                engine.loss_scale.follow(scaler)
            elif step == 1:
                scaler.update(2.0)


def scalers(device_type: str) -> list[torch.amp.GradScaler]:
    """Return every rank's scaler; the scale is 1."""
    devices = [f"cuda:{rank}" if device_type == "cuda" else device_type for rank in range(WORLD_SIZE)]
    made = [torch.amp.GradScaler(device_type, init_scale=1.0) for _ in devices]
    for scaler, device in zip(made, devices, strict=True):
        scaler.scale(torch.zeros((), device=device))  # which makes its scale there
    return made


GUARDS = ("atomic", "unused", "joins", "rescaled")
FACTORS: dict[str, Sequence[Any]] = {
    "row": ROWS,
    "policy": ("fifo", "fused"),
    "residuals": RESIDUAL_STORAGES,
    **dict.fromkeys(GUARDS, (False, True)),
    "run": RUNS,
}


def covering_pairs(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few choices of one value for each factor, in which every two values of two factors occur together.

    Greedy: each choice begins with the first pair that is missing, and gives one factor after another the value that
    meets most missing pairs.
    """
    missing = {
        ((one, a), (other, b)): None  # a dict keeps the order
        for one, other in itertools.combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    }
    chosen = []
    while missing:
        choice = dict(next(iter(missing)))
        for name, values in factors.items():
            if name not in choice:
                met = {value: len(_met(factors, choice | {name: value}, missing)) for value in values}
                choice[name] = max(met, key=met.__getitem__)
        for pair in _met(factors, choice, missing):
            del missing[pair]
        chosen.append(choice)
    return chosen


def _met(factors: Iterable[str], choice: Mapping[str, Any], missing: Container[Any]) -> list[Any]:
    given = [(name, choice[name]) for name in factors if name in choice]
    return [pair for pair in itertools.combinations(given, 2) if pair in missing]


def chosen() -> list[tuple[Combination, str]]:
    """Return combinations and their runs, in which all pairs occur.

    Few pairs of a guard and a row with factors have a CPU's bits beside them, so each such row has each guard alone.
    """
    pairs = [(Combination(**choice), run) for choice in covering_pairs(FACTORS) for run in [choice.pop("run")]]
    rows = [row for row in ROWS if BY_NAME[row].rank]
    alone = [
        Combination(row=row, policy="fifo", residuals=residuals, **{guard: True})
        for row in rows
        for guard, residuals in zip(GUARDS, itertools.cycle(("fp32", "host")), strict=False)
    ]
    return pairs + [(combination, "late") for combination in alone if (combination, "late") not in pairs]
