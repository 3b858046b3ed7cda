"""Names of PyTorch's class that begin with an underscore but are used by programs anyway."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.features.buffers import Buffers
from ddp_core.features.static_graph import StaticGraph
from ddp_core.features.unused import UnusedParameters
from ddp_core.hooks import CommHook
from ddp_core.logging_data import describe
from ddp_core.replicas import MESSAGE_BYTES

_ARGUMENTS = {
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "device_ids",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "output_device",
}


class PyTorchNames:
    """Names that ``DistributedDataParallel`` provides for compatibility; ``self`` is always a wrapped module."""

    broadcast_bucket_size = MESSAGE_BYTES

    @property
    def buffer_hook(self: Any) -> tuple[object, Callable[..., Any]] | None:
        """The buffer hook and its state."""
        return cast(Buffers, self.module_buffers).hook

    @buffer_hook.setter
    def buffer_hook(self: Any, hook: tuple[object, Callable[..., Any]] | None) -> None:
        self.module_buffers.hook = hook

    @property
    def forward_sync_buffers(self: Any) -> bool:
        """True if buffers are synchronised in each forward pass."""
        return cast(Buffers, self.module_buffers).every_forward

    @forward_sync_buffers.setter
    def forward_sync_buffers(self: Any, value: bool) -> None:
        self.module_buffers.every_forward = value

    def __getattr__(self: Any, name: str) -> Any:
        """Return an argument of the constructor that PyTorch's class keeps, under its name."""
        if name in _ARGUMENTS:
            return getattr(self.settings, name)
        return nn.Module.__getattr__(self, name)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Ignore parameters and buffers of these names; call it before wrapping ``module``."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]  # 'Incompatible types in assignment'
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]  # '"Tensor" has no attribute "_ddp_ignored"'

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Return None: torch.compile must not split graphs at bucket boundaries."""

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters, or (name, parameter), that are not ignored."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _set_static_graph(self: Any) -> None:
        """Do the same as ``static_graph=True``."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        if self.reducer.iteration.number > 0:
            raise self.reducer.noted(RuntimeError("_set_static_graph should be called before training loop starts"))
        if self.find_unused_parameters:
            warnings.warn("static_graph learns unused parameters by itself: drop find_unused_parameters", stacklevel=2)
        self.static_graph = True
        searching = self.reducer.find(UnusedParameters)
        if searching is not None:
            self.reducer.remove(searching)
            self.reducer.layout.learns_order = True
        self.reducer.add(StaticGraph(self.settings.skip_all_reduce_unused_params))

    def _set_ddp_sink_clone(self: Any, val: bool) -> None:
        """Set whether outputs are copied at the sink: False saves memory, but forbids modifying them in place."""
        self._sink_clones = val

    @property
    def _comm_hooks(self: Any) -> list[tuple[Callable[..., Any], object]]:
        """The registered hook: one pair of hook and state, or nothing."""
        hook = self.reducer.hook
        return [] if hook is None else [(hook.function, hook.state)]

    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        """Register one of PyTorch's two built-in hooks (``dist.BuiltinCommHookType``), in its Python form."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # it imports PyTorch's own DDP

        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.reducer.set_hook(CommHook(self.process_group, hooks[comm_hook_type.name], str(comm_hook_type)))

    def _register_buffer_comm_hook(
        self: Any, state: object, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Synchronise buffers with ``hook(state, buffers_by_name)``; it may return futures, awaited after backward.

        ``comm_hook_location`` is an enum member called POST_FORWARD (the default) or PRE_FORWARD.
        """
        if not callable(hook):
            raise TypeError(f"a buffer hook must be callable (got {type(hook).__name__})")
        self.module_buffers.hook = (state, hook)
        self.module_buffers.before_module = getattr(comm_hook_location, "name", "") == "PRE_FORWARD"

    def _default_broadcast_coalesced(
        self: Any,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Copy buffers from one rank, as without a buffer hook; ``bucket_size`` has no effect."""
        self.broadcast_module_buffers(authoritative_rank, bufs)

    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        """Return settings, buckets and the latest error as a dictionary of strings and integers."""
        return describe(self.module, self.reducer, self.settings, self._join_config.enable, self.static_graph)

    def _check_reducer_finalized(self: Any) -> None:
        """Raise RuntimeError if the latest backward pass left a reduction unfinished."""
        self.reducer.require_finished()

    def _remove_autograd_hooks(self: Any) -> None:
        """Stop listening to the parameters, so that the module can be wrapped again."""
        self.reducer.listener.detach()

    def _update_process_group(self: Any, new_process_group: Any) -> None:
        """Switch to other ranks: discard unfinished reductions, and rebuild buckets after the next backward pass."""
        within = isinstance(new_process_group, dist.ProcessGroup)
        self.reducer.reset(new_process_group if within else self.reducer.process_group)
