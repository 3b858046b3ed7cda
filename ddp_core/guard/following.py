"""PyTorch's DistributedDataParallel, which reports nothing, noticed and followed from outside."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP

from ddp_core.guard.intent import GuardMode
from ddp_core.guard.outside import judge_unknown
from ddp_core.guard.suspicion import Named, Step, current_pass, preludes, see_steps
from ddp_core.guard.wrappers import WrapperGuard, guarded_parameters, of_wrappers

PRIVATE_NAMES = (
    "torch:Tensor._version",
    "torch._C:_current_graph_task_id",
    "torch._C._distributed_c10d:GradBucket",
    "torch._compile:_disable_dynamo",
    "torch._dynamo.eval_frame:OptimizedModule._orig_mod",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch.distributed:Reducer._check_reducer_finalized",
)
FOLLOWS_PYTORCH = hasattr(dist, "Reducer") and hasattr(dist.Reducer, "_check_reducer_finalized")
"""False if this PyTorch does not tell when its reducer is done: its DistributedDataParallel is then not guarded."""


class FollowingGuard(WrapperGuard):
    """The guard of PyTorch's DistributedDataParallel: its parameters, its hook and autograd report what it does."""

    def __init__(self, wrapper: Any, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(wrapper, named)
        self._pass = -1  # the backward pass in which the hook was called
        self._reduced: set[int] = set()  # ids of the parameters in its buckets so far, if some may be skipped
        self._handles = [_listen(parameter, self.log.append) for parameter in self.parameters()]
        unguarded.pop(wrapper, None)

    def remove(self) -> None:
        """Judge no step any more, and listen to no gradient."""
        while self._handles:
            self._handles.pop().remove()
        super().remove()

    def require_finished(self) -> None:
        """Raise the reducer's own error if a reduction began and has not ended."""
        self.wrapper.reducer._check_reducer_finalized()

    def launched(self, bucket: GradBucket) -> None:
        """Note that the reducer has passed a bucket to its hook: this pass will end in a reduction."""
        if getattr(self.wrapper, "skip_all_reduce_unused_params", False):
            self._reduced.update(map(id, bucket.parameters()))
        now = current_pass()
        if now not in (-1, self._pass):  # -1: on a rank that has joined
            self._pass = now
            queue = torch.autograd.Variable._execution_engine.queue_callback
            # Twice: the reducer queues its own callback with the last bucket, after this one.
            queue(functools.partial(queue, self._pass_ended))

    def _pass_ended(self) -> None:
        self._pass = -1
        if self.wrapper is None:
            return
        try:
            self.require_finished()
        except RuntimeError:  # a bucket is missing, and nothing was written back: the next forward pass says so
            return
        reduced, self._reduced = self._reduced, set()
        self.averaged([p for p in self.parameters() if id(p) not in reduced] if reduced else ())


def _listen(parameter: Tensor, append: Callable[[Tensor], None]) -> Any:
    frozen = not parameter.requires_grad  # such a one cannot be listened to
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(append)  # a C function: no Python frame for each gradient
    parameter.requires_grad_(not frozen)
    return handle


unguarded: weakref.WeakKeyDictionary[Module, Named] = weakref.WeakKeyDictionary()
"""PyTorch's wrappers without a guard, with the parameters in their buckets."""
_is_ours: list[Callable[[Any, Any], bool]] = []


def guard_wrapper(
    wrapper: Module,
    named: Iterable[tuple[str, Tensor]],
    mode: GuardMode | None = None,
    limit: float | None = None,
    *,
    is_copy: bool = False,
) -> WrapperGuard | None:
    """Return the guard of a wrapper, which gets one if it has none; ``named`` are the parameters in its buckets.

    ``limit``: seconds to wait for ranks that are late; None: as before, at first the process group's timeout.
    ``is_copy``: see `WrapperGuard`.
    None if the wrapper is PyTorch's, and this version does not have what following it needs.
    """
    guard = of_wrappers.get(wrapper)
    if guard is None and not isinstance(wrapper, PyTorchDDP):
        guard = WrapperGuard(wrapper, named, is_copy=is_copy)
    elif guard is None and FOLLOWS_PYTORCH:
        guard = FollowingGuard(wrapper, named)
    if guard is None:
        return None
    guard.reaction.mode = mode or guard.reaction.mode
    guard.peers.limit = guard.peers.limit if limit is None else limit
    return guard


def release_wrapper(wrapper: Module) -> None:
    """Guard a wrapper of PyTorch's no more, and listen to none of its gradients, until one of our hooks runs in it."""
    guard = of_wrappers.get(wrapper)
    if isinstance(guard, FollowingGuard):
        del of_wrappers[wrapper]
        guard.remove()
        unguarded[wrapper] = list(guard.named.values())


def notice_wrappers(is_ours: Callable[[Any, Any], bool]) -> None:
    """Guard each DistributedDataParallel of PyTorch with a hook and state for which ``is_ours`` returns True.

    A hook is told no module, so wrappers are noticed as they are made, by PyTorch's public hook for submodules.
    """
    _is_ours.append(is_ours)
    if len(_is_ours) == 1 and FOLLOWS_PYTORCH:
        register_module_module_registration_hook(_noticed)
        see_steps()
        if dist.is_available() and dist.is_initialized():  # some may have been made before
            for wrapper in [one for one in gc.get_objects() if type(one) is PyTorchDDP]:
                _noticed(wrapper, "module", wrapper.module)


def _noticed(module: Module, name: str, child: Module | None) -> None:
    if name == "module" and isinstance(module, PyTorchDDP) and child is not None:
        ignored = getattr(child, "_ddp_params_and_buffers_to_ignore", ())
        unguarded[module] = [(n, p) for n, p in child.named_parameters() if p.requires_grad and n not in ignored]


def _prepare(step: Step) -> None:
    """Guard the wrappers on which a hook of ours is registered by now, and judge parameters that none knows."""
    for wrapper, named in list(unguarded.items()):
        hooks = getattr(wrapper, "_comm_hooks", ())
        if any(is_ours(hook, state) for hook, state in hooks for is_ours in _is_ours):
            guard_wrapper(wrapper, named)
    if not of_wrappers:
        return
    lists = [group["params"] for group in step.optimizer.param_groups]
    if not all(guarded_parameters.issuperset(map(id, parameters)) for parameters in lists):
        elsewhere = {id(parameter) for named in unguarded.values() for _, parameter in named}
        known = guarded_parameters | elsewhere
        judge_unknown(step, [p for parameters in lists for p in parameters if id(p) not in known])


preludes.append(_prepare)


def hook_ran(bucket: Any) -> None:
    """Note that a hook has received a bucket, in whatever wrapper of PyTorch's it is registered."""
    if not isinstance(bucket, GradBucket) or not (of_wrappers or unguarded):
        return
    listening = [guard for guard in of_wrappers.values() if isinstance(guard, FollowingGuard)]
    guard = listening[0] if len(listening) == 1 and not unguarded else _guard_of_bucket(bucket, listening)
    if guard is not None:
        guard.launched(bucket)


def _guard_of_bucket(bucket: GradBucket, listening: list[FollowingGuard]) -> FollowingGuard | None:
    parameter = bucket.parameters()[0]
    for wrapper, named in list(unguarded.items()):
        if any(one is parameter for _, one in named) and wrapper.require_backward_grad_sync:
            listening = [*listening, FollowingGuard(wrapper, named)]
    mine = [guard for guard in listening if id(parameter) in guard.named]
    return next((guard for guard in mine if guard.wrapper.require_backward_grad_sync), None)
