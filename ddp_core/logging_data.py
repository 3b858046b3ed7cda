"""What a wrapped module can say about itself, under the keys of PyTorch's ``_get_ddp_logging_data``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import SyncBatchNorm

if TYPE_CHECKING:
    from ddp_core.distributed import DistributedDataParallel


def describe(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return settings, buckets (sizes in bytes) and the latest error of ``ddp``, as strings and integers."""
    reducer = ddp.reducer
    sizes = ", ".join(str(bucket.flat.nbytes) for bucket in reducer.buckets)
    order = ", ".join(" ".join(map(str, bucket.indices)) for bucket in reducer.buckets)
    data = {
        "world_size": reducer.process_group.size(),
        "rank": reducer.process_group.rank(),
        "backend_name": reducer.process_group.name(),
        "iteration": reducer.iteration,
        "find_unused_parameters": int(reducer.settings.find_unused_parameters),
        "gradient_as_bucket_view": int(reducer.settings.gradient_as_bucket_view),
        "static_graph": int(reducer.static_graph),
        "can_set_static_graph": int(reducer.graph_is_static),
        "num_parameter_tensors": len(reducer.parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
        "unused_parameter_size": sum(reducer.parameters[i].nbytes for i in reducer.unused),
        "bucket_sizes": sizes,
        "num_buckets_reduced": reducer.buckets_reduced,
        "has_sync_bn": int(any(isinstance(module, SyncBatchNorm) for module in ddp.module.modules())),
        "join_uneven_inputs": int(ddp._join_config.enable),
        "has_rebuilt_buckets": int(reducer.rebuilt),
        "has_error": int(reducer.last_error is not None),
        "error": reducer.last_error or "",
    }
    if reducer.rebuilt:
        data |= {"rebuilt_bucket_sizes": sizes, "rebuilt_per_bucket_param_indices": order}
    return data | ({"comm_hook": reducer.hook.name} if reducer.hook else {})
