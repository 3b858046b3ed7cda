"""What a reducer tells the guard, which judges optimizers: the gradients that are not averaged, and when all are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from ddp_core.feature import Feature
from ddp_core.guard import WrapperGuard
from ddp_core.hooks import Pending
from ddp_core.reducer import Reducer


class Guarded(Feature):
    """The reports to one guard."""

    def __init__(self, guard: WrapperGuard) -> None:
        self.guard = guard

    def on_local(self, reducer: Reducer, parameter: Parameter) -> None:
        """Report a gradient that stays on this rank."""
        if parameter.grad is not None:
            self.guard.log.append(parameter)

    def at_end(self, reducer: Reducer) -> None:
        """Report that means come: optimisers may step as soon as there is one."""
        self.guard.finished = torch._C._current_graph_task_id()

    def finished(self, reducer: Reducer, in_flight: Sequence[Pending | None]) -> None:
        """Report the end, and the parameters that were left out."""
        left_out = [bucket for bucket, one in zip(reducer.layout.buckets, in_flight, strict=True) if one is None]
        self.guard.averaged([parameter for bucket in left_out for parameter in bucket.members])
