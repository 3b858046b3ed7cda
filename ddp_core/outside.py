"""Parameters that an optimizer trains outside every wrapper: a second model that was not wrapped, or a local probe."""

from __future__ import annotations

import itertools
import json
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_core.errors import ON_PURPOSE, NotAveragedWarning
from ddp_core.proof import Print, UnansweredError, fingerprints, in_thread, is_close, numbered, shared_store

ANSWER_SECONDS = 2.0  # for the store; no rank is waited for


class Outside:
    """The parameters of one optimizer that are in no wrapper: warn once if their replicas drift apart."""

    def __init__(self) -> None:
        self.known: dict[int, weakref.ref[Tensor]] = {}
        self.steps, self.next_look = 0, 2
        self.key = ""

    def step(self, optimizer: Optimizer, new: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Post fingerprints before the first step; before steps 2, 4, 8, ... rank 0 looks whether all ranks have.

        ``new`` are parameters with gradients that no earlier step has seen.
        """
        self.steps += 1
        store = shared_store(group) if self.next_look else None
        if store is None:
            return
        try:
            if new and not self.key:  # parameters that come later are not compared
                shapes = [tuple(parameter.shape) for parameter in new]
                self.key = f"ddp_core/outside/{numbered(group, str(shapes))}"
                self.about = f"{len(new)} parameters (the first of shape {shapes[0]})"
                posted = json.dumps([_combined(fingerprints(new)), _combined(fingerprints([p.grad for p in new]))])
                in_thread(lambda _: store.set(f"{self.key}/{group.rank()}", posted), ANSWER_SECONDS, _ignore)
            elif self.steps == self.next_look and group.rank() == 0:
                keys = [f"{self.key}/{rank}" for rank in range(group.size())]
                told = in_thread(lambda _: _look(store, keys), ANSWER_SECONDS, _ignore)
                self.next_look = 0 if told else 2 * self.steps
                if told and _drift([json.loads(one) for one in told]):
                    warnings.warn(self._text(optimizer), NotAveragedWarning, stacklevel=2)
        except UnansweredError:  # nothing is known then; what is averaged is not in question
            self.next_look = 0
        self.known.update({id(parameter): weakref.ref(parameter) for parameter in new})

    def _text(self, optimizer: Optimizer) -> str:
        return (
            f"{type(optimizer).__name__} trains {self.about} outside every DistributedDataParallel. They were equal on "
            "all ranks before its first step, and their gradients were not, so replicas drift apart. Likely cause: one "
            f"of two models was not wrapped. {ON_PURPOSE}"
        )


def _ignore(_: float) -> None:
    """Warn of nobody: no rank is waited for."""


def _look(store: Any, keys: list[str]) -> list[Any]:
    return [store.get(key) for key in keys] if store.check(keys) else []


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
