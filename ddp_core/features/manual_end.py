"""``require_manual_backward_finalization``: ``finalize_backward`` ends a reduction, not the end of the pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_core.errors import amid_reduction
from ddp_core.feature import Feature
from ddp_core.features.delayed import DelayedGradients
from ddp_core.graph import at_end_of_backward
from ddp_core.reducer import Reducer


class ManualEnd(Feature):
    """A reduction that waits for the program."""

    def added(self, reducer: Reducer) -> None:
        """Queue nothing for the end of the backward pass."""
        reducer.queue = _not_yet

    def why_unfinished(self, reducer: Reducer) -> RuntimeError | None:
        """Return the error for a forgotten call."""
        if not all_are_launched(reducer):
            return None
        return RuntimeError("gradients are not averaged yet: call finalize_backward after each backward pass")


def _not_yet(_: Callable[[], None]) -> None: ...


def all_are_launched(reducer: Reducer) -> bool:
    """Return True between the launch of an iteration's last bucket and the end of its reduction."""
    return reducer.is_reducing and len(reducer.iteration.in_flight) == len(reducer.layout.buckets)


def set_manual_end(reducer: Reducer, by_hand: bool) -> None:
    """Let the program end reductions, or each backward pass its own."""
    if reducer.is_reducing:
        raise amid_reduction("require_manual_backward_finalization cannot be set")
    present = reducer.find(ManualEnd)
    if present is not None:
        reducer.remove(present)
        reducer.queue = at_end_of_backward
    if by_hand and reducer.find(DelayedGradients) is not None:
        raise NotImplementedError(
            "require_manual_backward_finalization: gradients of delay_all_reduce_named_params are reduced at the "
            "end of the backward pass; wrap the module without it."
        )
    if by_hand:
        reducer.add(ManualEnd(), first=True)


def end_by_hand(reducer: Reducer) -> None:
    """Do what the end of a backward pass does without this feature; raise RuntimeError if there is nothing to end."""
    if reducer.find(ManualEnd) is None:
        raise reducer.noted(
            RuntimeError(
                "finalize_backward: set ddp.require_manual_backward_finalization = True before the forward pass"
            )
        )
    if not all_are_launched(reducer):
        if reducer.is_reducing and torch._C._current_graph_task_id() != -1:
            raise reducer.noted(
                RuntimeError(
                    "finalize_backward: called within the backward pass, before all gradients were there; the last "
                    "parameter's register_post_accumulate_grad_hook is too early: call it after the pass"
                )
            )
        reducer.require_finished()  # raises, with the names of missing gradients, if a reduction was begun
        raise reducer.noted(
            RuntimeError(
                "finalize_backward: no reduction to end; call it once after each backward pass that synchronises"
            )
        )
    reducer.finish()
