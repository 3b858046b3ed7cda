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
from torch.distributed.algorithms.join import Joinable
from torch.nn import Parameter
from torch.utils import _pytree as pytree  # see ddp_core/graph.py

from ddp_core.buckets import MIB, Bucket, Layout
from ddp_core.compatibility import PyTorchNames
from ddp_core.construction import (
    check_arguments_without_effect,
    check_module,
    choose_buffer_sync,
    choose_devices,
    choose_limits,
    choose_process_group,
    refuse_distributed_autograd,
)
from ddp_core.feature import Feature
from ddp_core.features.bucket_memory import LazyBucket, LazyMemory, LazyViewBucket, ViewBucket
from ddp_core.features.bucket_plan import SavesBuckets
from ddp_core.features.buffers import Buffers
from ddp_core.features.delayed import DelayedGradients, choose_delay
from ddp_core.features.guarded import Guarded
from ddp_core.features.joining import MayRunOut, elect
from ddp_core.features.late import LateGradients
from ddp_core.features.manual_end import EndsByHand
from ddp_core.features.sparse import making_sparse, sparse_parameters
from ddp_core.features.stepping import StepsInBackward, take_over
from ddp_core.features.strides import Strides
from ddp_core.features.unused import UnusedParameters
from ddp_core.features.watch import Watch, all_parameters
from ddp_core.graph import outside_transforms, tensors_in, through_sink
from ddp_core.guard import guard_wrapper, warn_of_one_rank
from ddp_core.hooks import CommHook, Hook, check_hook, check_timeout
from ddp_core.reducer import Reducer
from ddp_core.replicas import broadcast_coalesced, verify_same_model
from ddp_core.settings import Settings

BUCKETS: dict[tuple[bool, bool], type[Bucket]] = {
    (False, False): Bucket,
    (False, True): LazyBucket,
    (True, False): ViewBucket,
    (True, True): LazyViewBucket,
}
"""Buckets by gradient_as_bucket_view and lazy_bucket_allocation."""


class DistributedDataParallel(PyTorchNames, SavesBuckets, EndsByHand, nn.Module, MayRunOut):
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
        devices, output_device = choose_devices(device_ids, output_device, managed)
        self.device: torch.device = managed[0].device
        self.settings = Settings(
            limits=choose_limits(bucket_cap_mb, bucket_cap_mb_list, static_graph or not find_unused_parameters),
            bucket_bytes_cap_list=[int(cap * MIB) for cap in bucket_cap_mb_list or []],
            device_ids=devices,
            output_device=output_device,
            dim=dim,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )
        self.static_graph = False
        self.require_forward_param_sync = True
        self._sink_clones = True
        sync_buffers_now, every_forward = choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.module_buffers = Buffers(module, self.parameters_to_ignore, every_forward=every_forward)
        if init_sync:
            buffers = self.module_buffers.named(module) if sync_buffers_now else {}
            named = [*self.replicated_parameters(), *buffers.items()]
            verify_same_model(named, group, self.device)
            broadcast_coalesced([tensor for _, tensor in named], group, source=0)
        self._build_reducer(group, static_graph)

    def _build_reducer(self, group: dist.ProcessGroup, static_graph: bool, *, is_copy: bool = False) -> None:
        """Make a reducer, with the features that this wrapper needs."""
        settings, delayed = self.settings, DelayedGradients(self._delay)
        trained = [(name, p) for name, p in self.managed_parameters() if p.requires_grad]
        sparse = set[int]()
        make: Callable[..., Bucket] = BUCKETS[settings.gradient_as_bucket_view, settings.lazy_bucket_allocation]
        if trained and (sparse := sparse_parameters(self.module)):
            make = making_sparse(make, sparse, group, trained[0][1].device)
        self.reducer = Reducer(Layout(trained, settings.limits, sparse, make), group)
        named = [*trained, *delayed.named]
        features: list[Feature] = [Strides(), LateGradients(named), self.module_buffers, Watch()]
        if settings.find_unused_parameters and trained:  # without buckets, all gradients are delayed
            features.insert(0, UnusedParameters(settings.skip_all_reduce_unused_params))
        if delayed.named:
            features.append(delayed)
        if settings.lazy_bucket_allocation:
            features.append(LazyMemory())
        guard = guard_wrapper(self, named, is_copy=is_copy)
        if guard is not None:
            features.append(Guarded(guard))
        for feature in features:
            self.reducer.add(feature)
        delayed.listen(self.reducer)
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
            self._begin_iteration()
        # From here on, collectives in the order of ShadowHook.main_hook, which issues those of joined ranks.
        self.notify_joined_ranks()
        if torch.is_grad_enabled():
            with outside_transforms():
                self.reducer.leave_iteration()
        if self.module_buffers.before_module and self.will_sync_module_buffers():
            self.module_buffers.synchronise(self.module, self._copy_buffers)
        self.promise_joined_ranks()

    def _begin_iteration(self) -> None:
        if self.reducer.iteration.number == 0:
            with outside_transforms():
                self._require_same_parameters()
            if take_over(all_parameters(self.reducer)) and self.reducer.find(StepsInBackward) is None:
                self.reducer.add(StepsInBackward())
        self.reducer.before_forward()

    @_disable_dynamo
    def _after_forward(self, outputs: Any, synchronises: bool) -> Any:
        reducer = self.reducer
        delayed, unused = reducer.find(DelayedGradients), reducer.find(UnusedParameters)
        if not self.module_buffers.before_module and self.will_sync_module_buffers():
            self.module_buffers.synchronise(self.module, self._copy_buffers)
        self.require_forward_param_sync = synchronises
        if delayed is not None and torch.is_grad_enabled():
            delayed.lend_memory()
        if synchronises:
            reducer.after_forward(tensors_in(outputs))
        if unused is not None:
            return through_sink(outputs, self._sink_clones, unused.enter)
        return outputs

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device_ids[0], non_blocking=True)

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next forward pass gives all ranks the same buffers."""
        return self.require_forward_param_sync and self.module_buffers.every_forward and self.module_buffers.any

    def _copy_buffers(self) -> None:
        # in join(), rank 0 may have run out of inputs, and its buffers are then out of date
        self.broadcast_module_buffers(elect(self, candidate=True) if self._join_config.enable else 0)

    @_disable_dynamo  # as in Layout.rebuild_in_order
    def broadcast_module_buffers(self, source: int, buffers: Sequence[Tensor] | None = None) -> None:
        """Overwrite every rank's buffers (None: all that are not ignored) with group rank ``source``'s."""
        broadcast_coalesced(
            buffers or list(self.module_buffers.named(self.module).values()), self.process_group, source
        )

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
            self.reducer.last_error = str(error)
            raise
        name = getattr(hook, "__qualname__", type(hook).__name__)
        self.reducer.set_hook(CommHook(state, hook, name, hook_timeout))
        return HookHandle(self.reducer)

    def remove_comm_hook(self) -> None:
        """Restore the averaging all-reduce."""
        self.reducer.set_hook(None)

    # ---------------------------------------------------------------- conversions, copies, pickles

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedDataParallel:
        """Apply ``.to()``, ``.half()`` and the like; raise if gradients would stay local afterwards."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # 'Call to untyped function "_apply"'
        self._require_same_parameters()
        return self

    def _require_same_parameters(self) -> None:
        """Raise RuntimeError if a parameter no longer reports here because a conversion gave it another graph node."""
        layout, delayed = self.reducer.layout, self.reducer.find(DelayedGradients)
        self.reducer.listener.require_nodes(zip(layout.names, layout.parameters, strict=True))
        self.reducer.listener.require_nodes(delayed.named if delayed else ())

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: another "
                "group cannot be found again. Copy or pickle ddp.module instead, and wrap it again."
            )
        return {name: value for name, value in self.__dict__.items() if name != "reducer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # 'Call to untyped function "__setstate__"'
        static_graph, self.static_graph = self.static_graph, False
        self._build_reducer(choose_process_group(None, None), static_graph, is_copy=True)


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
