"""Buckets in a checkpoint: what a resumed run needs to send the same sums, in the same places, as the run before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_core.buckets import ParameterSpec, Plan
from ddp_core.errors import amid_reduction
from ddp_core.features.unused import UnusedParameters
from ddp_core.reducer import Reducer


class SavesBuckets:
    """A wrapped module whose buckets can be saved and loaded; a base of ``DistributedDataParallel``."""

    reducer: Reducer

    def bucket_plan(self) -> dict[str, Any]:
        """Return the plan with which ``load_bucket_plan`` gives a resumed run these buckets.

        ``limits``: the rebuilt buckets' limits, in bytes. ``buckets``: the parameters' names, in the order in which
        they are sent. ``rebuilt``: False until the second iteration begins (static graph: the third), and always with
        ``find_unused_parameters``, whose buckets are the same from the first iteration on.
        """
        layout = self.reducer.layout
        names = [list(bucket.names) for bucket in layout.buckets]
        return {"limits": list(layout.limits.rebuilt), "buckets": names, "rebuilt": layout.rebuilt}

    def load_bucket_plan(self, plan: Mapping[str, Any]) -> bool:
        """Use the buckets of ``bucket_plan()`` from the next iteration on, without rebuilding them.

        A sum's last bits depend on the gradient's place in its bucket (on Gloo, from three ranks on), and a resumed run
        begins with different buckets than the run that it continues. Call it between iterations, on all ranks, with the
        same plan, and inside ``join`` only while no rank has joined. A copy or a pickle of this module does not contain
        the buckets: load the plan into it too. If gradients stay bucket views between steps
        (``gradient_as_bucket_view``, ``zero_grad(set_to_none=False)``), bit equality requires that every ``p.grad`` is
        a tensor of zeros before the plan is loaded.

        Returns False, and changes nothing, if the plan's buckets were not rebuilt yet, this module never rebuilds them
        (``find_unused_parameters``), limits differ, or the plan does not match the trained parameters: their
        names, dtypes, devices, and which gradients are sparse. Raises RuntimeError during a backward pass.
        """
        reducer, layout = self.reducer, self.reducer.layout
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
