"""The module a user wraps: the reducer, fed from the forward pass, behind PyTorch's interface."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import Parameter
from torch.utils import _pytree as pytree  # see ddp_core/graph.py

from ddp_core.bucketing import MIB, choose_limits, plan_from_names
from ddp_core.compatibility import PyTorchNames
from ddp_core.construction import (
    check_arguments_without_effect,
    check_module,
    choose_buffer_sync,
    choose_devices,
    choose_process_group,
    refuse_distributed_autograd,
    sparse_parameters,
)
from ddp_core.delayed import DelayedGradients, choose_delay
from ddp_core.errors import amid_reduction
from ddp_core.graph import tensors_in, through_sink
from ddp_core.guard import guard_wrapper, warn_of_one_rank
from ddp_core.hooks import CommHook, Hook, check_hook, check_timeout
from ddp_core.joining import MayRunOut, elect, exchange_sync_flag
from ddp_core.reducer import Reducer
from ddp_core.replicas import broadcast_coalesced, verify_same_model
from ddp_core.settings import ReducerSettings


class DistributedDataParallel(PyTorchNames, nn.Module, MayRunOut):
    """Data-parallel training of ``module``: gradients are averaged while the backward pass computes them.

    A drop-in replacement for ``torch.nn.parallel.DistributedDataParallel``, with its arguments; nothing else in a
    training script changes, and the result is that of local training on the combined batch.

    Args:
        module: any module; its parameters must have one device type, and be the same on every rank.
        device_ids: at most one device, to which inputs are moved; None: inputs are where the module is.
        output_device, dim, batched_grad_copy: accepted for compatibility; short gradients are always copied in batches.
        broadcast_buffers, check_reduction: deprecated; the first includes ``forward_sync_buffers``, the second
            has no effect.
        init_sync: compare models and copy rank 0's parameters and buffers at construction.
        process_group: the ranks to average over; None: all. ``device_mesh``: a 1-D mesh instead.
        bucket_cap_mb: size at which a bucket closes, MiB; None: 1 for the first, 25 for the others. Lower:
            communication starts earlier, in more and smaller messages. ``bucket_cap_mb_list``: one per bucket.
        find_unused_parameters: search the graph after each forward pass for parameters that no output depends on.
        gradient_as_bucket_view: ``p.grad`` *is* the bucket's memory: no copy back, and no second copy of all gradients.
        static_graph: the same parameters are used equally often in every iteration. Allows several reentrant
            checkpoints and learns unused parameters once.
        delay_all_reduce_named_params: (name, parameter) pairs from ``module`` that are in no bucket. One all-reduce
            averages their gradients, which are always views of its memory; hooks do not see them.
        param_to_hook_all_reduce: the parameter whose gradient that all-reduce waits for. It also waits until every
            delayed gradient is ready and every bucket is launched; with a communication hook, until it is done.
        mixed_precision: raises an error that names an alternative.
        skip_all_reduce_unused_params: a bucket none of whose parameters was used is not reduced; the same parameters
            must be unused on every rank.
        forward_sync_buffers: copy rank 0's buffers to all ranks before each forward pass (default True).
        lazy_bucket_allocation: take a bucket's memory when its first gradient is copied, and release it at the end of
            the backward pass (with ``gradient_as_bucket_view``: once no gradient is a view of it any longer). Buckets
            and activations then share memory; a hook gets other memory in every step.

    Raises:
        RuntimeError: no parameter requires a gradient, a parameter is uninitialised, or models differ between ranks.
        ValueError: mixed device types, wrong device arguments, no process group, SyncBatchNorm on the CPU.
        NotImplementedError: an argument that is not supported.

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
        lazy_bucket_allocation: bool = False,
    ):
        super().__init__()
        Joinable.__init__(self)
        check_arguments_without_effect(mixed_precision, check_reduction)
        self.module = module
        self.device_mesh = device_mesh
        group = choose_process_group(process_group, device_mesh)
        warn_of_one_rank(group)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delay = choose_delay(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.parameters_to_ignore |= {name for name, _ in self._delay.named}
        managed = [parameter for _, parameter in self.replicated_parameters()]
        check_module(module, managed)
        self.device_ids, self.output_device = choose_devices(device_ids, output_device, managed)
        self.device: torch.device = managed[0].device
        self.dim = dim
        sync_buffers_now, self.forward_sync_buffers = choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        one_bucket = static_graph or not find_unused_parameters
        limits, rebuilt_limits = choose_limits(bucket_cap_mb, bucket_cap_mb_list, one_bucket)
        self.bucket_bytes_cap = max(rebuilt_limits)
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in bucket_cap_mb_list or []]
        self.static_graph = False
        self.require_forward_param_sync = True
        self.buffer_hook = None
        self._buffers_sync_before_forward = True
        self._has_buffers = bool(self.module_buffers())  # a module may replace buffers later, but not gain its first
        self._sink_clones = True
        if init_sync:
            named = self.replicated_parameters() + list(self.module_buffers().items() if sync_buffers_now else [])
            verify_same_model(named, group, self.device)
            broadcast_coalesced([tensor for _, tensor in named], group, source=0)
        settings = ReducerSettings(
            limits=limits,
            rebuilt_limits=rebuilt_limits,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )
        self._build_reducer(group, settings, static_graph)

    def _build_reducer(
        self, group: dist.ProcessGroup, settings: ReducerSettings, static_graph: bool, *, is_copy: bool = False
    ) -> None:
        trained = [(name, p) for name, p in self.managed_parameters() if p.requires_grad]
        sparse = sparse_parameters(self.module)
        self.reducer = Reducer(trained, sparse, group, settings, DelayedGradients(self._delay))
        named = zip(self.reducer.layout.names, self.reducer.layout.parameters, strict=True)
        self.reducer.guard = guard_wrapper(self, [*named, *self.reducer.delayed.named], is_copy=is_copy)
        self.reducer.paused = not self.require_backward_grad_sync
        if static_graph and trained:  # delayed gradients are reduced once, however often they come
            self._set_static_graph()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks over which gradients are averaged."""
        return self.reducer.process_group

    def managed_parameters(self) -> list[tuple[str, Any]]:
        """Return (name, parameter) for all that are not ignored or delayed, each once, frozen ones included."""
        return [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def replicated_parameters(self) -> list[tuple[str, Any]]:
        """Return (name, parameter) for all that are the same on every rank: the managed and the delayed ones."""
        return [*self.managed_parameters(), *self._delay.named]

    def module_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are not ignored, by name, as they are now: a module may replace them."""
        return {n: b for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore}

    # ---------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and prepare to reduce its parameters' gradients."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
            self._before_forward(synchronises)
            if self.device_ids:
                inputs, kwargs = pytree.tree_map_only(Tensor, self._to_device, (inputs, kwargs))
            return self._after_forward(self.module(*inputs, **kwargs), synchronises)

    @_disable_dynamo  # torch.compile(ddp) would trace the reducer, and retrace it in each of its phases
    def _before_forward(self, synchronises: bool) -> None:
        if self._join_config.enable:
            self._require_mirrorable()
        if synchronises:
            refuse_distributed_autograd()
            self.reducer.before_forward()
        # From here on, collectives in the order of Join and ShadowHook.main_hook, which issue those of joined ranks.
        active = Join.notify_join_context(self)
        self.reducer.join_work = None if self._divides_by_initial_world_size else active
        if torch.is_grad_enabled():
            self.reducer.leave_iteration()
        if self._buffers_sync_before_forward and self.will_sync_module_buffers():
            self._sync_buffers()
        self.reducer.promised = self._join_config.enable and exchange_sync_flag(self, joined=False)

    @_disable_dynamo
    def _after_forward(self, outputs: Any, synchronises: bool) -> Any:
        reducer = self.reducer
        if not self._buffers_sync_before_forward and self.will_sync_module_buffers():
            self._sync_buffers()
        self.require_forward_param_sync = synchronises
        if torch.is_grad_enabled():
            reducer.delayed.lend_memory()
        if synchronises:
            reducer.after_forward(tensors_in(outputs))
        if reducer.unused.searches:
            return through_sink(outputs, self._sink_clones, reducer.entered_through_outputs)
        return outputs

    def _to_device(self, tensor: Tensor) -> Tensor:
        assert self.device_ids, "inputs are moved only if there is a device to move them to"
        return tensor.to(self.device_ids[0], non_blocking=True)

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next forward pass copies rank 0's buffers to all ranks."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    def _sync_buffers(self) -> None:
        if self.buffer_hook is not None:
            state, hook = self.buffer_hook
            self.reducer.buffer_futures += hook(state, self.module_buffers()) or []
        else:  # in join(), rank 0 may have run out of inputs, and its buffers are then out of date
            self.broadcast_module_buffers(elect(self, candidate=True) if self._join_config.enable else 0)

    @_disable_dynamo  # as in Layout.rebuild_in_order
    def broadcast_module_buffers(self, source: int, buffers: Sequence[Tensor] | None = None) -> None:
        """Overwrite every rank's buffers (None: all that are not ignored) with group rank ``source``'s."""
        broadcast_coalesced(buffers or list(self.module_buffers().values()), self.process_group, source)

    # ---------------------------------------------------------------- accumulation

    @property
    def require_backward_grad_sync(self) -> bool:
        """False within ``no_sync``."""
        return not self.__dict__.get("_accumulates", False)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.__dict__["_accumulates"] = self.reducer.paused = not value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; use it around the forward pass or the backward pass.

        The first iteration outside reduces the accumulated gradients. Inside ``join`` it must include the forward pass,
        in which ranks that have joined learn whether to take part.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---------------------------------------------------------------- the end of a reduction

    @property
    def require_manual_backward_finalization(self) -> bool:
        """True if ``finalize_backward`` ends reductions, and not the end of a backward pass.

        Set it between a backward pass's end and the next forward pass. ``Optimizer.step`` raises before the reduction
        has ended.
        """
        return self.reducer.ends_by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.set_ends_by_hand(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if ``finalize_backward`` cannot be called during the coming backward pass.

        In the first iteration of a static graph, whose used parameters are known only afterwards.
        """
        return self.reducer.ends_by_hand and self.reducer.unused.learning

    def finalize_backward(self) -> None:
        """Wait for all buckets, and give every parameter its mean; see ``require_manual_backward_finalization``.

        Call it once for each backward pass that synchronises: after it, or in one of its hooks once all gradients are
        there. The ``register_post_accumulate_grad_hook`` of the last parameter is too early: its gradient is noted
        right after that. Raises RuntimeError if gradients are missing, after the pass with their names, or if there is
        nothing to end.
        """
        self.reducer.end_reduction()

    # ---------------------------------------------------------------- communication hooks

    def register_comm_hook(self, state: object, hook: Hook, *, hook_timeout: float | None = None) -> HookHandle:
        """Reduce every bucket with ``hook(state, bucket)`` from now on, instead of the averaging all-reduce.

        The hook receives undivided gradients, and returns a ``Future[Tensor]``, a ``Future[list[Tensor]]``, a
        ``Work`` or a ``Tensor``: the bucket's mean. A hook registered later replaces the earlier one.

        ``hook_timeout``: seconds that the end of a backward pass waits for one bucket before raising HookTimeoutError;
        None: the process group's timeout. Raise it for slow links.

        Returns a handle whose ``remove()`` restores the all-reduce. Raises TypeError or ValueError for an invalid
        hook or timeout, and RuntimeError during a backward pass.
        """
        try:
            check_hook(hook)
            check_timeout(hook_timeout)
        except (TypeError, ValueError) as error:
            self.reducer.progress.last_error = str(error)
            raise
        name = getattr(hook, "__qualname__", type(hook).__name__)
        self.reducer.set_hook(CommHook(state, hook, name, hook_timeout))
        return HookHandle(self.reducer)

    def remove_comm_hook(self) -> None:
        """Restore the averaging all-reduce."""
        self.reducer.set_hook(None)

    # ---------------------------------------------------------------- buckets in a checkpoint

    def bucket_plan(self) -> dict[str, Any]:
        """Return the plan with which ``load_bucket_plan`` gives a resumed run these buckets.

        ``limits``: the rebuilt buckets' limits, in bytes. ``buckets``: the parameters' names, in the order in which
        they are sent. ``rebuilt``: False until the second iteration begins (static graph: the third), and always with
        ``find_unused_parameters``, whose buckets are the same from the first iteration on.
        """
        reducer = self.reducer
        return {
            "limits": list(reducer.settings.rebuilt_limits),
            "buckets": [list(bucket.names) for bucket in reducer.layout.buckets],
            "rebuilt": reducer.layout.rebuilt,
        }

    def load_bucket_plan(self, plan: dict[str, Any]) -> bool:
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
        reducer = self.reducer
        if reducer.unfinished or torch._C._current_graph_task_id() != -1:
            raise amid_reduction("a bucket plan cannot be loaded")
        if not plan["rebuilt"] or reducer.unused.searches or plan["limits"] != list(reducer.settings.rebuilt_limits):
            return False
        fitting = plan_from_names(plan["buckets"], reducer.layout.names, reducer.layout.specs)
        if fitting is not None:
            reducer.layout.rebuild(fitting)
        return fitting is not None

    # ---------------------------------------------------------------- conversions, copies, pickles

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedDataParallel:
        """Apply ``.to()``, ``.half()`` and the like; raise if gradients would stay local afterwards."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # 'Call to untyped function "_apply"'
        self.reducer.require_same_parameters()
        return self

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: another "
                "group cannot be found again. Copy or pickle ddp.module instead, and wrap it again."
            )
        return self.__dict__ | {"reducer": self.reducer.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # 'Call to untyped function "__setstate__"'
        settings, static_graph, self.static_graph = self.__dict__.pop("reducer"), self.static_graph, False
        self._build_reducer(choose_process_group(None, None), settings, static_graph, is_copy=True)


class HookHandle:
    """A handle to remove a communication hook; does nothing if it was already replaced or removed."""

    def __init__(self, reducer: Reducer):
        self._reducer = weakref.ref(reducer)
        self._hook = reducer.hook

    def remove(self) -> None:
        """Restore the averaging all-reduce, if the hook is still the registered one."""
        reducer = self._reducer()
        if reducer is not None and reducer.hook is self._hook:
            reducer.set_hook(None)
