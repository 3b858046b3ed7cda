"""The functions that a DDP calls: the hook that `attach` registers on a model, and stateless hooks.

PyTorch's contract for a communication hook is `hook(state, bucket) -> Future[Tensor]`, and PyTorch inspects a hook
before registering it. The second argument must be *named* `bucket`. Annotations, if there are any, must be real objects
rather than strings, so the files of this package that define hooks have no `from __future__ import annotations`. Except
with NCCL, PyTorch also rejects any function whose `__name__` is `bf16_compress_hook` or `bf16_compress_wrapper_hook`,
because its own hooks of those names need NCCL. Ours do not, so the functions behind those public names have different
names.
"""

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo
from torch.nn import Module

from commhooks.communicators.parent_group import group_or_default
from commhooks.compressors import AllReduceMean
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError
from commhooks.hooks.facts import check_bucket
from commhooks.hooks.foreign import name_of
from commhooks.language.compressor import Compressor
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.ledger import Statistics
from ddp_core.guard import hook_ran, notice_wrappers

COLLECTIVES_A_BUCKET = 16
"""The limit of ddp_core's wait for a bucket, in timeouts of one collective."""

_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Compressor, Engine]] = weakref.WeakKeyDictionary()
"""One engine for each process group and compressor.

These engines keep nothing between steps, so models can share one. The keys are weak: destroying a group drops its
engines, and a new group gets new ones even if it has the same name.
"""


@_disable_dynamo  # a compiled training step, with its backward pass, would trace the engine
def run_stateless(
    compressor: Compressor, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket with a stateless compressor, on the engine of its process group."""
    check_bucket(bucket)
    hook_ran(bucket)
    return _run_alone(compressor, process_group, bucket)


def _run_alone(
    compressor: Compressor, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    group = group_or_default(process_group)
    engines = _engines.setdefault(group, {})
    if compressor in engines and bucket.index() == 0:
        try:
            engines[compressor].connection.check_ranks()
        except AttachError:  # it keeps nothing between steps, so that it can simply begin anew with all ranks
            engines.pop(compressor).stop()
    if compressor not in engines:
        connection = ProcessGroupConnection(group, label=repr(compressor))
        engines[compressor] = Engine(compressor, connection, by_parameter=False)
    return deliver(engines[compressor].run(bucket), bucket)


def hook_statistics(process_group: dist.ProcessGroup | None = None) -> dict[str, Statistics]:
    """Return this rank's totals of the stateless hooks on a process group, by compressor.

    All models that use such a hook on the group are counted together. A hook with state, or an attachment, has its own
    `statistics()`.
    """
    engines = _engines.get(group_or_default(process_group), {})
    return {repr(compressor): engine.statistics() for compressor, engine in engines.items()}


def deliver(future: torch.futures.Future[Tensor], bucket: object) -> torch.futures.Future[Tensor]:
    """Return a future whose failure reaches the DDP that passed in `bucket`.

    PyTorch's reducer reads an exception set on a future as if it were a value, and crashes; it recognises an error only
    if a callback of the future raises one.
    """
    return future.then(_value_of) if isinstance(bucket, GradBucket) else future


def _value_of(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.value()


class AttachmentState:
    """The state of the hook that is registered on a model.

    PyTorch's DDP only ever accepts one hook, so the hook stays registered while attachments come and go. With nothing
    attached, it averages as the model would without a hook.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._registered = False
        self._removable: Any = None

    def plug_in(self, engine: Engine, model: Module, seconds: float) -> None:
        """Run `engine` from now on; register the hook on the model unless it is still registered.

        If a DDP limits its wait for a hook, as ddp_core's does, the limit is raised above `seconds`, the scheduler's
        limit of one collective, since the DDP's covers a whole bucket. Only a scheduler that hangs should reach it.
        """
        self._group = weakref.ref(group_or_default(getattr(model, "process_group", None)))
        self.engine = engine
        if self._registered:
            return
        register: Any = model.register_comm_hook
        has_limit = "hook_timeout" in inspect.signature(register).parameters
        limit = {"hook_timeout": float(seconds) * COLLECTIVES_A_BUCKET} if has_limit else {}
        self._removable = register(self, attachment_hook, **limit)
        self._registered = True

    def release(self) -> None:
        """Drop the engine, and remove the hook if the DDP allows it, as ddp_core's does."""
        self.engine = None
        if self._removable is not None and hasattr(self._removable, "remove"):
            # After a backward pass that was cut short, ddp_core's raises: the hook stays registered, and runs an
            # all-reduce.
            with contextlib.suppress(RuntimeError):
                self._removable.remove()
                self._registered = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as a state without an engine: a copy of a model has nothing attached."""
        return type(self), ()

    @_disable_dynamo  # as run_stateless
    def run(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket with the engine, or with a plain all-reduce if nothing is attached."""
        if self.engine is None:
            return _run_alone(AllReduceMean(), self._group(), bucket)  # as if no hook were registered: not guarded
        hook_ran(bucket)
        return deliver(self.engine.run(bucket), bucket)


_states: weakref.WeakKeyDictionary[object, AttachmentState] = weakref.WeakKeyDictionary()


def caller_of_hook(ddp: Module) -> object:
    """Return what calls the hook of a DDP: its reducer, which a copy that was made of its attributes shares.

    `Module._replicate_for_data_parallel` makes such copies; others, deep ones included, have a reducer of their own.
    """
    return getattr(ddp, "reducer", None) or ddp


def attachment_state_of(ddp: Module) -> AttachmentState:
    """Return the state of a DDP's hook, a new one if nothing was attached to it so far."""
    return _states.setdefault(caller_of_hook(ddp), AttachmentState())


def attachment_hook(state: AttachmentState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket with the compressor attached to the model, or with a plain all-reduce."""
    return state.run(bucket)


def check_is_free(caller: str, ddp: Module) -> None:
    """Raise `AttachError` if a hook is attached to a DDP or registered on it."""
    attached = _states.get(caller_of_hook(ddp))
    if attached is not None and attached.engine is not None:
        raise AttachError(
            f"{caller}: {attached.engine.compressor!r} is attached to this model already; close its handle first."
        )
    registered = [hook for hook, _ in getattr(ddp, "_comm_hooks", []) if hook is not attachment_hook]
    if registered:
        raise AttachError(
            f"{caller}: the hook {name_of(registered[-1])} is registered on this model already; PyTorch's "
            "DistributedDataParallel never takes another one, ddp_core's does after remove_comm_hook()."
        )


def _is_ours(hook: Any, state: Any) -> bool:
    """Return whether a hook that is registered on a DDP is one of this package, and has an engine."""
    is_empty = isinstance(state, AttachmentState) and state.engine is None
    return str(getattr(hook, "__module__", "")).startswith("commhooks.") and not is_empty


notice_wrappers(_is_ours)  # PyTorch's wrappers with one of our hooks are guarded, as those of ddp_core are
