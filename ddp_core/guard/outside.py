"""Parameters that an optimizer trains outside every wrapper's buckets: a layer that was replaced, or a second model."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_core.errors import ON_PURPOSE
from ddp_core.guard.intent import is_standing, warn
from ddp_core.guard.proof import (
    Print,
    UnansweredError,
    fingerprints,
    in_thread,
    is_close,
    is_plain,
    numbered,
    shared_store,
)
from ddp_core.guard.suspicion import Step
from ddp_core.guard.wrappers import of_wrappers

ANSWER_SECONDS = 2.0  # for the store; no rank is waited for


def judge_unknown(step: Step, unknown: Sequence[Tensor]) -> None:
    """Judge a step's parameters that no reducer knows: of a wrapped model, or of none.

    Those of a wrapped model are suspect. The others may be a second model that was not wrapped, or a local probe.
    """
    outside = _outside.get(step.optimizer)
    new = [p for p in unknown if p.grad is not None and (outside is None or not outside.knows(p))]
    if not new and outside is None:
        return
    guards = [guard for guard in of_wrappers.values() if guard.compares() or guard.watches(step.optimizer)]
    for guard in guards if new else ():
        names = {id(p): name for name, p in guard.wrapper.module.named_parameters()}
        ignored = guard.wrapper.parameters_to_ignore
        left_out = [(names[id(p)], p) for p in new if names.get(id(p), "") not in ("", *ignored)]
        new = [p for p in new if id(p) not in names]
        guard.accuse(step, left_out)
    comparing = [guard for guard in guards if guard.compares() and guard.peers.are_there()]  # the others only watch
    if not comparing or is_standing(step.optimizer):
        return
    new = [p for p in new if is_plain(p)]
    if outside is None and new:
        outside = _outside[step.optimizer] = Outside()
    if outside is not None:
        outside.step(step.optimizer, new, comparing[0].wrapper.process_group)


class Outside:
    """The parameters of one optimizer that are in no wrapper: warn once for each list of shapes if replicas drift.

    Of optimizers with the same shapes, as inner loops make them, the 1st, 2nd, 4th, 8th, ... are looked at.
    """

    def __init__(self) -> None:
        self.known: dict[int, weakref.ref[Tensor]] = {}
        self.steps = 0
        self.next_look = 2  # the step; 0: none
        self.shapes: list[tuple[int, ...]] = []  # of the parameters that are compared
        self.key = ""  # of what is told of them

    def knows(self, parameter: Tensor) -> bool:
        """Return True if an earlier step has seen the parameter with a gradient."""
        return id(parameter) in self.known and self.known[id(parameter)]() is parameter

    def step(self, optimizer: Optimizer, new: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Post fingerprints before the first step; before steps 2, 4, 8, ... rank 0 looks whether all ranks have.

        ``new`` are parameters with gradients that no earlier step has seen.
        """
        self.steps += 1
        self.known.update({id(parameter): weakref.ref(parameter) for parameter in new})
        store = shared_store(group) if self.next_look else None
        if store is None:
            return
        try:
            if new and not self.key:  # parameters that come later are not compared
                self._post(store, new, group)
            elif self.steps == self.next_look and group.rank() == 0:
                self._look(store, optimizer, group.size())
        except UnansweredError:  # nothing is known then; what is averaged is not in question
            self.next_look = 0

    def _post(self, store: Any, new: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self.shapes = [tuple(parameter.shape) for parameter in new]
        what = str(self.shapes)
        _made[what] += 1
        if _made[what].bit_count() > 1 or what in _warned:
            self.next_look = 0
            return
        self.key = f"ddp_core/outside/{numbered(group, what)}"
        posted = json.dumps([_combined(fingerprints(new)), _combined(fingerprints([p.grad for p in new]))])
        in_thread(lambda _: store.set(f"{self.key}/{group.rank()}", posted), ANSWER_SECONDS)

    def _look(self, store: Any, optimizer: Optimizer, size: int) -> None:
        keys = [f"{self.key}/{rank}" for rank in range(size)]
        told = in_thread(lambda _: _taken(store, keys), ANSWER_SECONDS)
        self.next_look = 0 if told else 2 * self.steps
        if told and _drift([json.loads(one) for one in told]):
            _warned.add(str(self.shapes))
            warn(
                f"{type(optimizer).__name__} trains {len(self.shapes)} parameters (the first of shape "
                f"{self.shapes[0]}) outside every DistributedDataParallel. They were equal on all ranks before its "
                "first step, and their gradients were not, so replicas drift apart. Likely cause: one of two models "
                f"was not wrapped. {ON_PURPOSE}"
            )


_outside: weakref.WeakKeyDictionary[Optimizer, Outside] = weakref.WeakKeyDictionary()
_made: Counter[str] = Counter()
"""How many optimizers have trained parameters of these shapes outside every wrapper."""
_warned: set[str] = set()
"""The shapes of which it was told."""


def _taken(store: Any, keys: list[str]) -> list[Any]:
    if not store.check(keys):
        return []
    told = [store.get(key) for key in keys]
    for key in keys:
        store.delete_key(key)
    return told


def _combined(prints: Sequence[Print | None]) -> Print:
    """Return one fingerprint of several tensors in their order."""
    told = [one for one in prints if one is not None]
    return [
        sum(one[0] ** 2 for one in told) ** 0.5,
        sum(one[1] * (1 + 1 / (1 + number)) for number, one in enumerate(told)),
        sum(one[2] * (1 + 1 / (1 + number)) for number, one in enumerate(told)),
    ]


def _drift(told: Sequence[tuple[Print, Print]]) -> bool:
    """Return True if parameters were equal everywhere, and some rank's gradient is like that of no other rank.

    If each is like some other one, smaller groups of ranks have averaged them.
    """
    if not all(is_close(parameters, told[0][0]) for parameters, _ in told):
        return False
    gradients = sorted(gradient for _, gradient in told)
    pairs = [is_close(one, other) for one, other in itertools.pairwise(gradients)]
    return not all(before or after for before, after in zip([False, *pairs], [*pairs, False], strict=True))
