"""``require_manual_backward_finalization``: ``finalize_backward`` ends a reduction, not the end of the pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_core.errors import amid_reduction
from ddp_core.feature import Feature
from ddp_core.features.delayed import DelayedGradients
from ddp_core.features.static_graph import StaticGraph
from ddp_core.graph import at_end_of_backward
from ddp_core.reducer import Reducer


class ManualEnd(Feature):
    """A reduction that waits for the program."""

    def added(self, reducer: Reducer) -> None:
        """Queue nothing for the end of the backward pass."""
        reducer.queue = _not_yet

    def why_unfinished(self, reducer: Reducer) -> RuntimeError | None:
        """Return the error for a forgotten call."""
        if not _all_are_launched(reducer):
            return None
        return RuntimeError("gradients are not averaged yet: call finalize_backward after each backward pass")


class EndsByHand:
    """A wrapped module whose reductions the program may end; a base of ``DistributedDataParallel``."""

    reducer: Reducer

    @property
    def require_manual_backward_finalization(self) -> bool:
        """True if ``finalize_backward`` ends reductions, and not the end of a backward pass.

        Set it between a backward pass's end and the next forward pass. ``Optimizer.step`` raises before the reduction
        has ended.
        """
        return self.reducer.find(ManualEnd) is not None

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        reducer, present = self.reducer, self.reducer.find(ManualEnd)
        if reducer.is_reducing:
            raise amid_reduction("require_manual_backward_finalization cannot be set")
        if required and reducer.find(DelayedGradients) is not None:
            raise NotImplementedError(
                "require_manual_backward_finalization: gradients of delay_all_reduce_named_params are reduced at the "
                "end of the backward pass; wrap the module without it."
            )
        if required and present is None:
            reducer.add(ManualEnd(), first=True)  # a forgotten call is the first thing to name
        elif present is not None and not required:
            reducer.remove(present)
            reducer.queue = at_end_of_backward

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if ``finalize_backward`` cannot be called during the coming backward pass.

        In the first iteration of a static graph, whose used parameters are known only afterwards.
        """
        static = self.reducer.find(StaticGraph)
        return self.require_manual_backward_finalization and static is not None and not static.firings

    def finalize_backward(self) -> None:
        """Wait for all buckets, and give every parameter its mean; see ``require_manual_backward_finalization``.

        Call it once for each backward pass that synchronises: after it, or in one of its hooks once all gradients are
        there. The ``register_post_accumulate_grad_hook`` of the last parameter is too early: its gradient is noted
        right after that. Raises RuntimeError if gradients are missing, after the pass with their names, or if there is
        nothing to end.
        """
        reducer = self.reducer
        why = ""
        if not self.require_manual_backward_finalization:
            why = "set ddp.require_manual_backward_finalization = True before the forward pass"
        elif reducer.is_reducing and not _all_are_launched(reducer) and torch._C._current_graph_task_id() != -1:
            why = (
                "called within the backward pass, before all gradients were there; the last parameter's "
                "register_post_accumulate_grad_hook is too early: call it after the pass"
            )
        elif not _all_are_launched(reducer):
            reducer.require_finished()  # raises, with the names of missing gradients, if a reduction was begun
            why = "no reduction to end; call it once after each backward pass that synchronises"
        if why:
            raise reducer.noted(RuntimeError(f"finalize_backward: {why}"))
        reducer.finish()


def _all_are_launched(reducer: Reducer) -> bool:
    """Return True between the launch of an iteration's last bucket and the end of its reduction."""
    return reducer.is_reducing and len(reducer.iteration.in_flight) == len(reducer.layout.buckets)


def _not_yet(_: Callable[[], None]) -> None: ...
