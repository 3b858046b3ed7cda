"""Buckets in a checkpoint: what a resumed run needs to send the same sums, in the same places, as the run before it.

A sum's last bits depend on the gradient's place in its bucket (on Gloo, from three ranks on), and a resumed run begins
with different buckets than the run that it continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_core.buckets import ParameterSpec, Plan
from ddp_core.errors import amid_reduction
from ddp_core.features.unused import UnusedParameters
from ddp_core.reducer import Reducer


def bucket_plan(reducer: Reducer) -> dict[str, Any]:
    """Return the plan of a reducer's buckets."""
    return {
        "limits": list(reducer.layout.limits.rebuilt),
        "buckets": [list(bucket.names) for bucket in reducer.layout.buckets],
        "rebuilt": reducer.layout.rebuilt,
    }


def load_bucket_plan(reducer: Reducer, plan: Mapping[str, Any]) -> bool:
    """Use a plan's buckets from the next iteration on; return False, and change nothing, if it does not fit."""
    layout = reducer.layout
    if reducer.is_unfinished or torch._C._current_graph_task_id() != -1:
        raise amid_reduction("a bucket plan cannot be loaded")
    never = reducer.find(UnusedParameters) is not None
    if never or not plan["rebuilt"] or plan["limits"] != list(layout.limits.rebuilt):
        return False
    fitting = plan_from_names(plan["buckets"], layout.names, layout.specs)
    if fitting is not None:
        layout.rebuild(fitting)
    return fitting is not None


def plan_from_names(
    buckets: Sequence[Sequence[str]], names: Sequence[str], specs: Sequence[ParameterSpec]
) -> Plan | None:
    """Turn buckets of parameter names into a plan for the parameters ``names``, or return None if they do not match.

    They match if every parameter occurs exactly once, no bucket mixes kinds, and sparse gradients are alone.
    """
    if sorted(name for bucket in buckets for name in bucket) != sorted(names):
        return None
    indices = {name: index for index, name in enumerate(names)}
    plan = [tuple(indices[name] for name in bucket) for bucket in buckets]
    return plan if all(_may_travel_together([specs[index] for index in bucket]) for bucket in plan) else None


def _may_travel_together(specs: Sequence[ParameterSpec]) -> bool:
    return len({(spec.kind, spec.alone) for spec in specs}) == 1 and (len(specs) == 1 or not specs[0].alone)
