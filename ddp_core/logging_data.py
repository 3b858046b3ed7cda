"""A wrapped module's report about itself, under the keys of PyTorch's ``_get_ddp_logging_data``."""

from __future__ import annotations

from typing import Any

from torch.nn import Module, SyncBatchNorm

from ddp_core.reducer import Reducer


def describe(module: Module, reducer: Reducer, in_join: bool) -> dict[str, Any]:
    """Return settings, buckets (sizes in bytes) and the latest error, as strings and integers."""
    sizes = ", ".join(str(bucket.nbytes) for bucket in reducer.layout.buckets)
    order = ", ".join(" ".join(map(str, bucket.indices)) for bucket in reducer.layout.buckets)
    data = {
        "world_size": reducer.process_group.size(),
        "rank": reducer.process_group.rank(),
        "backend_name": reducer.process_group.name(),
        "iteration": reducer.iteration,
        "find_unused_parameters": int(reducer.settings.find_unused_parameters),
        "gradient_as_bucket_view": int(reducer.settings.gradient_as_bucket_view),
        "static_graph": int(reducer.unused.static),
        "can_set_static_graph": int(reducer.graph_is_static),
        "num_parameter_tensors": len(reducer.layout.parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.layout.parameters),
        "unused_parameter_size": sum(reducer.layout.parameters[i].nbytes for i in reducer.unused.here),
        "bucket_sizes": sizes,
        "num_buckets_reduced": reducer.buckets_reduced,
        "has_sync_bn": int(any(isinstance(part, SyncBatchNorm) for part in module.modules())),
        "join_uneven_inputs": int(in_join),
        "has_rebuilt_buckets": int(reducer.layout.rebuilt),
        "has_error": int(reducer.progress.last_error is not None),
        "error": reducer.progress.last_error or "",
    }
    if reducer.layout.rebuilt:
        data |= {"rebuilt_bucket_sizes": sizes, "rebuilt_per_bucket_param_indices": order}
    return data | ({"comm_hook": reducer.hook.name} if reducer.hook else {})
