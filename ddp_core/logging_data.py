"""A wrapped module's report about itself, under the keys of PyTorch's ``_get_ddp_logging_data``."""

from __future__ import annotations

from typing import Any

from torch.nn import Module, SyncBatchNorm

from ddp_core.features.unused import UnusedParameters, UsedParameters
from ddp_core.reducer import Reducer
from ddp_core.settings import Settings


def describe(module: Module, reducer: Reducer, settings: Settings, in_join: bool, is_static: bool) -> dict[str, Any]:
    """Return settings, buckets (sizes in bytes) and the latest error, as strings and integers."""
    layout, searches = reducer.layout, reducer.find(UnusedParameters)
    unused = reducer.find(UsedParameters)
    sizes = ", ".join(str(sum(member.nbytes for member in bucket.members)) for bucket in layout.buckets)
    order = ", ".join(" ".join(map(str, bucket.indices)) for bucket in layout.buckets)
    left_out = sum(map(unused.leaves_out, layout.buckets)) if unused else 0
    reduced = len(layout.buckets) - left_out if reducer.iteration.number else 0
    data = {
        "world_size": reducer.process_group.size(),
        "rank": reducer.process_group.rank(),
        "backend_name": reducer.process_group.name(),
        "iteration": reducer.iteration.number,
        "find_unused_parameters": int(settings.find_unused_parameters),
        "gradient_as_bucket_view": int(settings.gradient_as_bucket_view),
        "static_graph": int(is_static),
        "can_set_static_graph": int(searches is None or searches.is_constant),
        "num_parameter_tensors": len(layout.parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in layout.parameters),
        "unused_parameter_size": sum(layout.parameters[i].nbytes for i in (unused.here if unused else ())),
        "bucket_sizes": sizes,
        "num_buckets_reduced": reduced,
        "has_sync_bn": int(any(isinstance(part, SyncBatchNorm) for part in module.modules())),
        "join_uneven_inputs": int(in_join),
        "has_rebuilt_buckets": int(layout.rebuilt),
        "has_error": int(bool(reducer.last_error)),
        "error": reducer.last_error,
    }
    if layout.rebuilt:
        data |= {"rebuilt_bucket_sizes": sizes, "rebuilt_per_bucket_param_indices": order}
    return data | ({"comm_hook": reducer.hook.name} if reducer.hook else {})
