"""The one file that knows PyTorch's contract for communication hooks: `hook(state, bucket) -> Future[Tensor]`.

PyTorch looks at a hook before it takes it: the second argument must be *called* `bucket`; annotations, where there are
any, must be the real objects and not strings (so this file has no `from __future__ import annotations`); and off NCCL a
function whose `__name__` is `bf16_compress_hook` or `bf16_compress_wrapper_hook` is refused, because PyTorch's own of
that name needs NCCL. Ours does not, so the functions behind those public names are called something else.
"""

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import Module

from commhooks.communicators.connection import WrapCommunicator
from commhooks.compressors import AllReduceMean, make_compressor
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, CheckpointError, CommHooksError, SettingsError
from commhooks.hooks.foreign import name_of
from commhooks.language.compressor import Compressor
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.scheduling.thread import POLICIES
from commhooks.state.loss_scale import Scaler
from commhooks.state.memory import MemoryReport
from commhooks.state.resume import (
    load_state,
    saved_state,
    searches_for_unused,
    snapshot_of,
    sparse_parameters,
    uncut_steps,
)
from commhooks.state.snapshot import LoadRules, Snapshot
from commhooks.state.table import StateTable

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

COLLECTIVES_A_BUCKET = 16
"""How many collectives a bucket may take, each as long as its limit allows, before ddp_core gives the hook up."""


# --- attach ---------------------------------------------------------------------------------------------------------


class Attachment:
    """A handle on the compressor that works for a model: read its statistics, detach it."""

    def __init__(self, engine: Engine, socket: "_Socket", named: list[tuple[str, Tensor]], model: Module) -> None:
        self._engine = engine
        self._socket = socket
        self._named = named
        self._model = weakref.ref(model)

    @property
    def compressor(self) -> Compressor:
        """The compressor at work."""
        return self._engine.compressor

    @property
    def state(self) -> StateTable:
        """What the compressor remembers, by parameter."""
        return self._engine.state

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """Which of how many ranks this is, in the model's process group."""
        return self._engine.rank_and_world_size

    @property
    def steps(self) -> int:
        """How many backward passes were synchronised since attaching."""
        return self._engine.step

    def statistics(self) -> Statistics:
        """Return what was counted since attaching, on this rank."""
        return self._engine.statistics()

    def last_step(self) -> Statistics:
        """Return what the last whole step counted, on this rank."""
        return self._engine.last_step()

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of what was counted since attaching, by name, on this rank."""
        return self._engine.by_parameter()

    def memory_report(self) -> MemoryReport:
        """Return how many bytes the hook takes on this rank, and for what."""
        return self._engine.memory_report()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain data: see `commhooks.state.snapshot` for what is where.

        This rank's residuals only, so call it on every rank, between two steps. Tensors are copies. Raises
        `CheckpointError` after a step that failed.
        """
        return saved_state(self._engine, self._model())

    def snapshot(self) -> Snapshot:
        """Return what `state_dict` does, with the tensors themselves and not copies."""
        return snapshot_of(self._engine, self._model())

    def differences(self, snapshot: Snapshot, rules: LoadRules) -> list[str]:
        """List every difference between a snapshot and this run that would make loading the snapshot raise."""
        return self._engine.differences(snapshot, rules)

    def load_state_dict(
        self,
        state: Mapping[str, Any] | CheckpointError,
        *,
        world_size: str = "refuse",
        settings: str = "refuse",
        missing: str = "refuse",
    ) -> None:
        """Go on from what `state_dict` returned; call it on every rank, between the same two steps.

        What may differ: `LoadRules`. Raises `CheckpointError` on every rank, and changes nothing, if the state is
        damaged or does not fit on any of them, or if ranks bring different ones. A rank that could not even read it
        hands in the `CheckpointError` that says why, so that the others hear of it.
        """
        rules = LoadRules(world_size=world_size, settings=settings, missing=missing)
        load_state(self._engine, state, rules, self._model())

    def set_grad_scale(self, scale: float) -> None:
        """Set the loss scale from the next step on; residuals are rescaled to it. See also `scaler` of `attach`."""
        self._engine.loss_scale.announce(scale)

    def replace(self, compressor: Compressor | str) -> None:
        """Let another compressor go on from the next step, with the state that is there.

        Every rank must replace between the same two steps. A residual is taken over by whichever compressor keeps one,
        and waits where none does; a basis of another size starts anew. Raises `AttachError` where ranks disagree or a
        step is under way, and `SettingsError` for settings that do not fit the model; the old compressor then stays.
        """
        if self._socket.attachment is not self:
            raise AttachError("replace: this attachment was detached; attach again.")
        compressor = checked_compressor("replace", compressor)
        refusal = refusal_of(compressor, self._named)
        self._engine.replace(compressor, self._named[0][1].device, refusal)

    def detach(self) -> None:
        """Give the model back its plain all-reduce, and end the scheduler. A second call does nothing.

        Every rank must detach between the same two steps. PyTorch's DistributedDataParallel accepts one hook, ever:
        afterwards `attach` works again on the same model, but `register_comm_hook` does not.
        """
        try:
            if self._socket.attachment is self:
                self._socket.release()
        finally:
            self._engine.stop()


def attach(
    model: Module,
    compressor: Compressor | str,
    *,
    policy: str = "fifo",
    process_group: dist.ProcessGroup | None = None,
    wrap_communicator: WrapCommunicator | None = None,
    hook_timeout: float | None = None,
    scaler: Scaler | None = None,
    residuals: str = "fp32",
    atomic: bool = False,
) -> Attachment:
    """Let `compressor` average the gradients of `model`, a DistributedDataParallel of ddp_core's or PyTorch's.

    Call it on every rank, between the same two backward passes. A string is a name for `make_compressor`.

    - `policy` is the order of collectives: "fifo" goes bucket by bucket and overlaps with the backward pass; "fused"
      makes one collective of each round of all buckets, after the last one.
    - `process_group` is the model's own by default. Off NCCL a private Gloo group of the same ranks carries all
      requests; if the model's own is of another backend, or written in Python, a warning names it, unless this or the
      next argument is given.
    - `wrap_communicator` may put another communicator round the real one.
    - `hook_timeout`, in seconds, bounds every collective, and under "fused" the wait for a step's next bucket (default:
      the group's timeout).
    - `scaler`, a `torch.amp.GradScaler`: residuals follow when it changes the scale of the loss.
    - `residuals` is how they are kept: "fp32" (fp64 for gradients of that), "bf16", or "host", in fp32 in the host's
      memory.
    - `atomic`: a step whose mean holds an inf or a NaN in any bucket changes no state at all. Costs a second copy of
      the state. Without it "fused" judges all buckets' messages together, and "fifo" each bucket by itself.

    Raises `AttachError` if something is attached or registered already, if the model is no DistributedDataParallel, if
    its process group has no name or store, or if ranks disagree about compressor, policy or parameters; `SettingsError`
    for settings that cannot work.
    """
    inner = getattr(model, "module", None)
    if not hasattr(model, "register_comm_hook") or not isinstance(inner, Module):
        raise AttachError(
            f"attach: expected a DistributedDataParallel, ddp_core's or PyTorch's (got {type(model).__name__}); "
            "wrap the model first."
        )
    compressor = checked_compressor("attach", compressor)
    check_run_settings("attach", policy, hook_timeout)
    check_step_has_an_end("attach", model, policy, atomic=atomic)
    if torch._C._current_graph_task_id() != -1:
        raise AttachError("attach: a backward pass is under way; attach between two of them.")
    group = group_or_default(process_group if process_group is not None else getattr(model, "process_group", None))
    socket = _sockets.setdefault(model, _Socket())
    if socket.attachment is not None:
        raise AttachError(
            f"attach: {socket.attachment.compressor!r} is attached to this model already; detach it first."
        )
    registered = [hook for hook, _ in getattr(model, "_comm_hooks", []) if hook is not attachment_hook]
    if registered:
        raise AttachError(
            f"attach: the hook {name_of(registered[-1])} is registered on this model already; PyTorch's "
            "DistributedDataParallel never takes another one, ddp_core's does after remove_comm_hook()."
        )
    named: list[tuple[str, Tensor]] = [
        (name, parameter)
        for name, parameter in inner.named_parameters()
        if parameter.requires_grad and name not in getattr(model, "parameters_to_ignore", ())
    ]
    if not named:
        raise AttachError("attach: no gradient comes in a bucket: every parameter is ignored or delayed.")
    refusal = refusal_of(compressor, named)
    engine = Engine(
        compressor,
        group,
        policy=policy,
        terms=_describe_parameters(named),
        refusal=refusal,
        wrap_communicator=wrap_communicator,
        hook_timeout=hook_timeout,
        residuals=residuals,
        atomic=atomic,
        may_be_unused=searches_for_unused(model),
        may_bypass=process_group is not None or wrap_communicator is not None,
    )
    engine.uncut_steps = uncut_steps(model)
    if scaler is not None:
        engine.loss_scale.follow(scaler)
    engine.bind(named)
    engine.open(named[0][1].device)
    attachment = Attachment(engine, socket, named, model)
    socket.take(attachment, group_or_default(getattr(model, "process_group", None)))
    socket.plug_into(model, engine.timeout if hook_timeout is None else hook_timeout)
    return attachment


def refusal_of(compressor: Compressor, named: list[tuple[str, Tensor]]) -> SettingsError | None:
    """Return why the compressor's settings do not fit; the other ranks must hear of it before it is raised."""
    try:
        compressor.check_parameters(name for name, _ in named)
    except SettingsError as error:
        return error
    return None


def checked_compressor(caller: str, compressor: Compressor | str) -> Compressor:
    """Return the compressor, made if it is a name; raise `SettingsError` for anything else."""
    if isinstance(compressor, str):
        compressor = make_compressor(compressor)
    if not isinstance(compressor, Compressor):
        raise SettingsError(f"{caller}: expected a Compressor or a name (got {compressor!r}).")
    return compressor


def check_run_settings(caller: str, policy: str, hook_timeout: float | None) -> None:
    """Raise `SettingsError` for a policy that does not exist, or a time limit that is none."""
    if policy not in POLICIES:
        raise SettingsError(f"{caller}(policy={policy!r}): policy must be one of {', '.join(POLICIES)}.")
    if hook_timeout is not None and not 0 < hook_timeout < math.inf:
        raise SettingsError(f"{caller}(hook_timeout={hook_timeout!r}): hook_timeout must be above 0 s, and finite.")


def check_step_has_an_end(caller: str, model: Module, policy: str, *, atomic: bool) -> None:
    """Raise `AttachError` where a run that waits for a step's last bucket would wait for ever."""
    whole_steps = "policy must be 'fifo' and atomic False" if policy == "fused" or atomic else ""
    if whole_steps and _numbers_no_bucket_last(model):
        raise AttachError(
            f"{caller}: {whole_steps} for PyTorch's DistributedDataParallel with static_graph=True and parameters "
            "of several dtypes or devices, sparse gradients, or bucket_cap_mb_list: its first iteration has several "
            "buckets, and does not say which is the last one."
        )
    if whole_steps and getattr(model, "skip_all_reduce_unused_params", False):
        raise AttachError(
            f"{caller}: {whole_steps} for a model with skip_all_reduce_unused_params=True, which may leave out the "
            "bucket that ends a step."
        )


def _numbers_no_bucket_last(model: Module) -> bool:
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel) or not getattr(model, "static_graph", False):
        return False
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    sparse = sparse_parameters(model) & trained  # each has a bucket of its own
    kinds = {(parameter.dtype, parameter.device) for parameter in trained - sparse}
    return len(kinds) + len(sparse) > 1 or bool(getattr(model, "bucket_bytes_cap_list", ()))


class _Socket:
    """What is registered on a model; attachments come and go in it, as PyTorch's DDP accepts one hook, ever."""

    def __init__(self) -> None:
        self.attachment: Attachment | None = None
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._registered = False
        self._removable: Any = None

    def take(self, attachment: Attachment, group: dist.ProcessGroup) -> None:
        """Take an attachment, to run from now on."""
        self.attachment = attachment
        self._group = weakref.ref(group)

    def plug_into(self, model: Module, seconds: float) -> None:
        """Register on the model, unless that was done before and cannot be undone.

        A DDP that limits its wait for a hook, as ddp_core's does, gets a longer limit than the scheduler's `seconds`:
        those bound one collective, the DDP's limit a whole bucket. Only a scheduler that itself hangs should reach it.
        """
        if self._registered:
            return
        register: Any = model.register_comm_hook
        has_limit = "hook_timeout" in inspect.signature(register).parameters
        limit = {"hook_timeout": seconds * COLLECTIVES_A_BUCKET} if has_limit else {}
        try:
            self._removable = register(self, attachment_hook, **limit)
        except Exception:
            assert self.attachment is not None
            self.attachment.detach()
            raise
        self._registered = True

    def release(self) -> None:
        """Let go of the attachment; ddp_core's DDP is rid of the hook too."""
        self.attachment = None
        if self._removable is not None and hasattr(self._removable, "remove"):
            # In the middle of a backward pass that was cut short the socket stays, and averages.
            with contextlib.suppress(RuntimeError):
                self._removable.remove()
                self._registered = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as an empty one: a copy of a model has nothing attached."""
        return type(self), ()

    def run(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Run the attachment's engine, or nothing but an all-reduce where there is none any more."""
        if self.attachment is None:
            return run_stateless(AllReduceMean(), self._group(), bucket)
        return deliver(self.attachment._engine.run(bucket), bucket)


_sockets: weakref.WeakKeyDictionary[Module, _Socket] = weakref.WeakKeyDictionary()


def attachment_hook(state: _Socket, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Run whatever is attached to the model."""
    return state.run(bucket)


def _describe_parameters(named: Iterable[tuple[str, Tensor]]) -> str:
    return "\n".join(f"parameter {name} of shape {tuple(p.shape)}, {p.dtype}" for name, p in named)


# --- how a hook without attach finds its engine -----------------------------------------------------------------------

_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Compressor, Engine]] = weakref.WeakKeyDictionary()
"""Engines of the hooks whose state is only a process group, one for each group and compressor.

They keep nothing between steps, so models may share one. Keyed weakly: a group that is destroyed takes its engines
along,
and a new group gets new ones, also if it has the same name."""


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group, the default one for None; raise if there is none yet."""
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise CommHooksError("there is no process group; call torch.distributed.init_process_group first.")
    if not isinstance(group, dist.ProcessGroup):
        raise CommHooksError(f"expected a process group that this rank belongs to (got {group!r}).")
    return group


def run_stateless(
    compressor: Compressor, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Run a compressor that remembers nothing, on the engine of its process group."""
    group = group_or_default(process_group)
    engines = _engines.setdefault(group, {})
    if compressor not in engines:
        engines[compressor] = Engine(compressor, group, label=repr(compressor), by_parameter=False)
    return deliver(engines[compressor].run(bucket), bucket)


def hook_statistics(process_group: dist.ProcessGroup | None = None) -> dict[str, Statistics]:
    """Return what the hooks without a state of their own have counted on a process group, by compressor, on this rank.

    All models that a hook was registered on count together. A hook with a state, or an attachment, tells its own.
    """
    engines = _engines.get(group_or_default(process_group), {})
    return {repr(compressor): engine.statistics() for compressor, engine in engines.items()}


def deliver(future: torch.futures.Future[Tensor], bucket: object) -> torch.futures.Future[Tensor]:
    """Return a future whose failure reaches the DDP at hand.

    PyTorch's reducer takes an exception set on a future for its value; only one that a callback raises is an error to
    it.
    """
    return future.then(_value_of) if isinstance(bucket, GradBucket) else future


def _value_of(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.value()
