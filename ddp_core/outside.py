"""Parameters that an optimizer trains outside every wrapper: a second model that was not wrapped, or a local probe."""

from __future__ import annotations

import itertools
import json
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_core.errors import ON_PURPOSE, NotAveragedWarning
from ddp_core.proof import Print, UnansweredError, fingerprints, in_thread, is_close, numbered, shared_store

ANSWER_SECONDS = 2.0  # for the store; no rank is waited for


_made: Counter[str] = Counter()
"""How many optimizers have trained parameters of these shapes outside every wrapper."""
_warned: set[str] = set()
"""The shapes of which it was told."""


class Outside:
    """The parameters of one optimizer that are in no wrapper: warn once for each list of shapes if replicas drift.

    Of optimizers with the same shapes, as inner loops make them, the 1st, 2nd, 4th, 8th, ... are looked at.
    """

    def __init__(self) -> None:
        self.known: dict[int, weakref.ref[Tensor]] = {}
        self.steps, self.next_look = 0, 2
        self.key = ""

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
                shapes = [tuple(parameter.shape) for parameter in new]
                self.shapes = str(shapes)
                _made[self.shapes] += 1
                if _made[self.shapes].bit_count() > 1 or self.shapes in _warned:
                    self.next_look = 0
                    return
                self.key = f"ddp_core/outside/{numbered(group, self.shapes)}"
                self.about = f"{len(new)} parameters (the first of shape {shapes[0]})"
                posted = json.dumps([_combined(fingerprints(new)), _combined(fingerprints([p.grad for p in new]))])
                in_thread(lambda _: store.set(f"{self.key}/{group.rank()}", posted), ANSWER_SECONDS, _ignore)
            elif self.steps == self.next_look and group.rank() == 0:
                keys = [f"{self.key}/{rank}" for rank in range(group.size())]
                told = in_thread(lambda _: _look(store, keys), ANSWER_SECONDS, _ignore)
                self.next_look = 0 if told else 2 * self.steps
                if told and _drift([json.loads(one) for one in told]):
                    _warned.add(self.shapes)
                    warnings.warn(self._text(optimizer), NotAveragedWarning, stacklevel=2)
        except UnansweredError:  # nothing is known then; what is averaged is not in question
            self.next_look = 0

    def _text(self, optimizer: Optimizer) -> str:
        return (
            f"{type(optimizer).__name__} trains {self.about} outside every DistributedDataParallel. They were equal on "
            "all ranks before its first step, and their gradients were not, so replicas drift apart. Likely cause: one "
            f"of two models was not wrapped. {ON_PURPOSE}"
        )


def _ignore(_: float) -> None:
    """Warn of nobody: no rank is waited for."""


def _look(store: Any, keys: list[str]) -> list[Any]:
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
