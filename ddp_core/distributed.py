"""The module a user wraps: the reducer, fed from the forward pass, behind PyTorch's interface."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import Parameter
from torch.utils import _pytree as pytree  # see ddp_core/graph.py

from ddp_core.bucketing import BucketLimits
from ddp_core.construction import (
    check_module,
    choose_buffer_sync,
    choose_devices,
    choose_process_group,
    refuse,
    sparse_parameters,
)
from ddp_core.graph import at_end_of_backward, tensors_in, through_sink
from ddp_core.hooks import CommHook, Hook, check_hook
from ddp_core.joining import ShadowHook, elect, exchange_sync_flag
from ddp_core.logging_data import describe
from ddp_core.reducer import Reducer, ReducerSettings
from ddp_core.replicas import broadcast_coalesced, verify_same_model


class DistributedDataParallel(nn.Module, Joinable):
    """Train ``module`` on every rank of a process group, averaging gradients while the backward pass computes them.

    Takes the place of ``torch.nn.parallel.DistributedDataParallel``, whose arguments it has; nothing else in a
    training script changes, and the result is that of local training on the joined batch.

    Args:
        module: any module; its parameters must be of one device type, and the same on every rank.
        device_ids: at most one device, to which inputs are moved; None: inputs are where the module is.
        output_device: kept for PyTorch's sake.
        dim: kept for PyTorch's sake.
        broadcast_buffers: deprecated; see ``forward_sync_buffers``.
        init_sync: compare models and copy rank 0's parameters and buffers at construction.
        process_group: the ranks to average over; None: all.
        bucket_cap_mb: size at which a bucket closes, MiB; None: 1 for the first, 25 for the others. Lower:
            communication starts earlier, in more and smaller messages.
        find_unused_parameters: search the graph after each forward pass for parameters that no output depends on.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: ``p.grad`` *is* the bucket's memory: no copy back, no second copy of all gradients.
        static_graph: the same parameters are used, equally often, in every iteration. Allows several reentrant
            checkpoints and learns unused parameters once.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision: refused, naming an alternative.
        device_mesh: a 1-D mesh, in place of ``process_group``.
        skip_all_reduce_unused_params: a bucket none of whose parameters was used is not reduced; the same parameters
            must be unused on every rank.
        bucket_cap_mb_list: a size per bucket, MiB; the last one repeats.
        batched_grad_copy: accepted; short gradients are always moved in one batch.
        forward_sync_buffers: copy rank 0's buffers to all ranks before each forward pass (default True).

    Raises:
        RuntimeError: no parameter requires a gradient, a parameter is uninitialised, or models differ between ranks.
        ValueError: mixed device types, wrong device arguments, no process group, SyncBatchNorm on the CPU.
        NotImplementedError: an argument that is refused.

    Source: Li et al., PyTorch Distributed, VLDB 2020.

    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ):
        super().__init__()
        Joinable.__init__(self)
        delayed = delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None
        refuse("delay_all_reduce_named_params", delayed, "a communication hook can delay any bucket it is given.")
        refuse("mixed_precision", mixed_precision is not None, "use torch.autocast, or a casting communication hook.")
        if check_reduction:
            warnings.warn("check_reduction is deprecated and has no effect", FutureWarning, stacklevel=2)
        self.module = module
        self.process_group = choose_process_group(process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        managed = [parameter for _, parameter in self.managed_parameters()]
        check_module(module, managed)
        self.device_ids, self.output_device = choose_devices(device_ids, output_device, managed)
        self.device = managed[0].device
        self.dim = dim
        init_sync_buffers, self.forward_sync_buffers = choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.bucket_cap_mb, self.bucket_cap_mb_list = bucket_cap_mb, bucket_cap_mb_list
        self._has_buffers = bool(self.managed_buffers())  # a module may replace buffers later, but not gain its first
        self.static_graph = False
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.buffer_hook: tuple[Any, Callable[..., Any], str] | None = None
        self._sink_clones = True
        if init_sync:
            self._synchronise_replicas(init_sync_buffers)
        self._build_reducer(static_graph)

    def _synchronise_replicas(self, with_buffers: bool) -> None:
        trained = [(name, p) for name, p in self.managed_parameters() if p.requires_grad]
        verify_same_model([n for n, _ in trained], [p for _, p in trained], self.process_group, self.device)
        tensors: list[Tensor] = [parameter for _, parameter in self.managed_parameters()]
        broadcast_coalesced(tensors + (self.managed_buffers() if with_buffers else []), self.process_group, 0)

    def _build_reducer(self, static_graph: bool) -> None:
        trained = [(name, p) for name, p in self.managed_parameters() if p.requires_grad]
        sparse = sparse_parameters(self.module)
        one_bucket = static_graph or not self.find_unused_parameters
        settings = ReducerSettings(
            limits=BucketLimits.choose(self.bucket_cap_mb, self.bucket_cap_mb_list, one_bucket),
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
        )
        self.reducer = Reducer(
            [p for _, p in trained],
            [name for name, _ in trained],
            [id(p) in sparse for _, p in trained],
            self.process_group,
            settings,
        )
        if static_graph:
            self._set_static_graph()

    def managed_parameters(self) -> list[tuple[str, Parameter]]:
        """Return (name, parameter) for all that are not ignored, each once, frozen ones included."""
        return [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def managed_buffers(self) -> list[Tensor]:
        """Return the buffers that are not ignored, as they are now: a module may replace them."""
        return list(self._named_buffers().values())

    def _named_buffers(self) -> dict[str, Tensor]:
        return {n: b for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore}

    # ---------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and prepare to reduce the gradients of what it returns."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._before_forward(inputs, kwargs)
            return self._after_forward(self.module(*inputs, **kwargs))

    @property
    def _synchronises(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._synchronises:
            self.reducer.before_forward()
        active = Join.notify_join_context(self)
        if active is not None and not self.divide_by_initial_world_size:
            self.reducer.join_divisor = (active, active.result()[0])
        if torch.is_grad_enabled():
            self.reducer.rebuild_if_due()
        if self.will_sync_module_buffers() and self._buffer_hook_runs("PRE_FORWARD"):
            self._sync_buffers()
        if self._join_config.enable:
            self._promised_sync = exchange_sync_flag(self, joined=False)
        if self.device_ids:
            device = self.device_ids[0]
            inputs, kwargs = pytree.tree_map_only(
                Tensor, lambda tensor: tensor.to(device, non_blocking=True), (inputs, kwargs)
            )
        return inputs, kwargs

    def _after_forward(self, outputs: Any) -> Any:
        if self.will_sync_module_buffers() and not self._buffer_hook_runs("PRE_FORWARD"):
            self._sync_buffers()
        self.require_forward_param_sync = self._synchronises
        if self._synchronises:
            self.reducer.after_forward(tensors_in(outputs) if self.reducer.searches_graph else [])
        if self.reducer.searches_graph or (self._synchronises and self.reducer.learns_graph):
            return through_sink(outputs, _BackwardBegins(self.reducer), self._sink_clones)
        return outputs

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next forward pass copies rank 0's buffers to all ranks."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    def _sync_buffers(self) -> None:
        if self.buffer_hook is not None:
            state, hook, _ = self.buffer_hook
            self.reducer.buffer_futures += hook(state, self._named_buffers()) or []
            return
        # rank 0 may have run out of inputs, and its buffers are then out of date
        self.broadcast_buffers_from(elect(self, candidate=True) if self._join_config.enable else 0)

    def broadcast_buffers_from(self, source: int) -> None:
        """Overwrite every rank's buffers with those of group rank ``source``."""
        broadcast_coalesced(self.managed_buffers(), self.process_group, source)

    def _buffer_hook_runs(self, when: str) -> bool:
        return (self.buffer_hook[2] if self.buffer_hook is not None else "PRE_FORWARD") == when

    # ---------------------------------------------------------------- accumulation, uneven inputs

    @property
    def require_backward_grad_sync(self) -> bool:
        """False within :meth:`no_sync`."""
        return not self.__dict__.get("_accumulating", False)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.__dict__["_accumulating"] = not value
        if "reducer" in self.__dict__:
            self.reducer.paused = not value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone, round the forward pass or round the backward pass.

        The first iteration outside reduces what was accumulated. Inside :meth:`join` it must go round the forward
        pass: ranks that have joined are told there whether to take part.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may run out of inputs at different times.

        A rank that leaves its loop early takes part in the others' collectives with zeros, until all have left; then
        all get the model of the last one.

        Args:
            divide_by_initial_world_size: divide by all ranks, so that every input weighs the same; False: by those
                that still train.
            enable: False makes this a context without effect.
            throw_on_early_termination: instead of going on, raise RuntimeError on every rank.

        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return what ``torch.distributed.algorithms.join.Join`` runs on ranks that have joined."""
        return ShadowHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that ``Join`` issues."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the collectives that ``Join`` issues."""
        return self.process_group

    # ---------------------------------------------------------------- communication hooks

    def register_comm_hook(self, state: object, hook: Hook) -> HookHandle:
        """Let ``hook(state, bucket)`` reduce every bucket from now on, in place of the averaging all-reduce.

        The hook gets gradients that are not divided, and returns a ``Future[Tensor]``, a ``Future[list[Tensor]]``, a
        ``Work`` or a ``Tensor``: the bucket's mean. A hook registered later takes the place of the earlier one.

        Returns a handle whose ``remove()`` goes back to the all-reduce.

        Raises TypeError or ValueError for what cannot be a hook, RuntimeError in the middle of a backward pass.
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self.reducer.last_error = str(error)
            raise
        self._set_hook(CommHook(state, hook))
        return HookHandle(self)

    def _set_hook(self, hook: CommHook | None) -> None:
        if self.reducer.in_progress:
            raise RuntimeError(
                "a communication hook cannot be registered, replaced or removed while gradients are being reduced; "
                "do it between the end of one backward pass and the start of the next"
            )
        self.reducer.hook = hook

    def remove_comm_hook(self) -> None:
        """Go back to the averaging all-reduce."""
        self._set_hook(None)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register one of PyTorch's two built-in hooks (``dist.BuiltinCommHookType``), in its Python form."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # it imports PyTorch's own DDP

        hooks: dict[str, Hook] = {
            "ALLREDUCE": default_hooks.allreduce_hook,
            "FP16_COMPRESS": default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = "POST_FORWARD"
    ) -> None:
        """Let ``hook(state, buffers_by_name)`` synchronise buffers; it may return futures, awaited after backward."""
        self.buffer_hook = (state, hook, getattr(comm_hook_location, "name", comm_hook_location))

    # ---------------------------------------------------------------- less common

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        """Leave parameters and buffers of these names alone; call it before wrapping ``module``."""
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]  # 'expression has type "Sequence[str]", variable has type "Tensor | Module"'

    def _set_static_graph(self) -> None:
        """Do what ``static_graph=True`` does; call it before the first forward pass."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        if self.find_unused_parameters:
            warnings.warn("static_graph learns unused parameters by itself: drop find_unused_parameters", stacklevel=2)
        self.static_graph = True
        self.reducer.set_static_graph()

    def _set_ddp_sink_clone(self, value: bool) -> None:
        """Say whether outputs are copied where they pass the sink: False saves memory, but forbids ``loss /= n``."""
        self._sink_clones = value

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return settings, buckets, times and errors as a dictionary of strings and integers."""
        return describe(self.reducer)

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the latest backward pass left a reduction unfinished."""
        self.reducer.require_finished()

    def _remove_autograd_hooks(self) -> None:
        """Stop listening to the parameters, so that the module can be wrapped again."""
        self.reducer.detach()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on with other ranks: forget the unfinished, and rebuild buckets after the next backward pass."""
        self.reducer.reset()
        if isinstance(new_process_group, dist.ProcessGroup):  # else this rank is outside it
            self.process_group = self.reducer.process_group = new_process_group

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: another "
                "group cannot be found again. Copy or pickle ddp.module instead, and wrap it again."
            )
        state = copy.copy(self.__dict__)
        del state["process_group"], state["reducer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # 'Call to untyped function "__setstate__"'
        self.process_group = choose_process_group(None, None)
        static_graph, self.static_graph = self.static_graph, False
        self._build_reducer(static_graph)


class _BackwardBegins:
    """Called when the outermost backward pass enters the module."""

    def __init__(self, reducer: Reducer):
        self.reducer = weakref.ref(reducer)

    def __call__(self) -> None:
        reducer = self.reducer()
        if reducer is not None and reducer.learns_graph and reducer.expecting:
            at_end_of_backward(reducer.reduce_all_at_once)


class HookHandle:
    """Removes a communication hook; removing one that was replaced or removed already does nothing."""

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp = weakref.ref(ddp)
        self._hook = ddp.reducer.hook

    def remove(self) -> None:
        """Go back to the averaging all-reduce, if the hook is still the registered one."""
        ddp = self._ddp()
        if ddp is not None and ddp.reducer.hook is self._hook:
            ddp.remove_comm_hook()
