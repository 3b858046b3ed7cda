"""Gradients in another form than expected: a warning of strides that are slow, an error for sparse ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ddp_core.buckets import strides_for
from ddp_core.errors import unannounced_sparse
from ddp_core.feature import Feature
from ddp_core.hooks import Pending
from ddp_core.lifecycle import Phase
from ddp_core.reducer import Reducer


class Strides(Feature):
    """A look at every gradient of two iterations: before buckets are rebuilt, and after."""

    def __init__(self) -> None:
        self.iterations_to_check = 2

    def added(self, reducer: Reducer) -> None:
        """Look, or look again."""
        self.iterations_to_check = 2
        if self not in reducer.observers:
            reducer.observers.append(self)

    def on_gradient(self, reducer: Reducer, index: int) -> None:
        """Warn once about a gradient that is slow to copy; raise RuntimeError for a sparse one in a dense bucket."""
        layout = reducer.layout
        grad, parameter = layout.parameters[index].grad, layout.parameters[index]
        if reducer.paused or reducer.iteration.phase not in (Phase.EXPECTING, Phase.REDUCING):
            return  # it stays on this rank
        if grad is None or layout.specs[index].alone or self.iterations_to_check == 0:
            return
        if grad.is_sparse:
            raise unannounced_sparse(layout.names[index])
        strides = strides_for(parameter)
        if any(g != v for g, v, size in zip(grad.stride(), strides, grad.shape, strict=True) if size > 1):
            self.iterations_to_check = 0
            warnings.warn(
                f"the gradient of parameter {layout.names[index]!r} has strides {grad.stride()}, its bucket view "
                f"{strides}: results are right, but copies are slow.",
                stacklevel=2,
            )

    def finished(self, reducer: Reducer, in_flight: Sequence[Pending | None]) -> None:
        """Look no more after the second iteration."""
        self.iterations_to_check = max(0, self.iterations_to_check - 1)
        if self.iterations_to_check == 0 and self in reducer.observers:
            reducer.observers.remove(self)  # not among gradients, for which the list is read
