"""Attach a compressor to a DistributedDataParallel: `attach`, and the `Attachment` that it returns."""

from __future__ import annotations

import warnings
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.connection import WrapCommunicator
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, SettingsError
from commhooks.hooks.facts import check_hook_is_called, check_step_has_an_end, searches_for_unused, sparse_parameters
from commhooks.hooks.handle import Handle, check_flags, check_run_settings, checked_compressor, refusal_of
from commhooks.hooks.sockets import Socket, caller_of_hook, check_is_free, group_or_default, socket_of
from commhooks.hooks.watching import Watch, optimizer_of
from commhooks.language.compressor import Compressor, inner_of
from commhooks.language.entries import RESIDUAL
from commhooks.language.place import Place
from commhooks.language.text import name_of
from commhooks.scheduling.line import ProcessGroupLine
from commhooks.scheduling.policy import PolicyName
from commhooks.state.loss_scale import LossScale, Scaler
from commhooks.state.table import ResidualStorage, StateTable
from commhooks.unwrapping import find_ddp, trained_parameters
from commhooks.wrappers.error_feedback import WithoutFeedback
from ddp_core.guard import GuardMode, check_mode, guard_wrapper, release_wrapper


class Attachment(Handle):
    """A compressor attached to a model, as returned by `attach`.

    All counts start at zero when the compressor is attached.
    """

    def __init__(self, engine: Engine, socket: Socket, named: list[tuple[str, Tensor]], model: Module) -> None:
        self._engine: Engine = engine
        self._socket = socket
        self._named = named
        self._model = weakref.ref(model)
        self._caller = weakref.ref(caller_of_hook(model))
        self._sparse = sparse_parameters(model)
        self._watches: list[Watch] = []

    def _made_engine(self) -> Engine:
        return self._engine

    @property
    def state(self) -> StateTable:
        """The compressor's state, by parameter."""
        return self._engine.state

    @property
    def steps(self) -> int:
        """The number of backward passes synchronised since attaching."""
        return self._engine.step

    @property
    def is_attached(self) -> bool:
        """True while the model's gradients go through this compressor: until `detach`, or until the model is gone."""
        return self._socket.engine is self._engine and self._caller() is not None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group whose ranks average together; None once it has been destroyed."""
        return self._line.process_group

    @property
    def hook_timeout(self) -> float | None:
        """The time limit of a collective, in seconds; None: the process group's."""
        return self._line.hook_timeout

    @property
    def _line(self) -> ProcessGroupLine:
        assert isinstance(self._engine.line, ProcessGroupLine), "attach makes no other"
        return self._engine.line

    def _check_open(self, caller: str) -> None:
        if not self.is_attached:
            raise AttachError(f"{caller}: this attachment was detached, or its model is gone; call attach again.")

    def watch(self, *optimizers: object) -> None:
        """Raise `NotAveragedError` whenever one of these takes a step on gradients that bypassed the compressor.

        Pass the optimizers of the attached model, or a framework's wrappers around them. This is the guard of `attach`
        in its strict form: the error is raised without comparing gradients with those of other ranks, so it does not
        wait for a rank that is late, and gradients that were averaged by hand are an error too. It is raised before the
        step changes anything, or after it if the step runs the backward pass itself, in a closure. At the first step,
        rank 0 warns if the compressor is known to do badly with such an optimizer. Watching ends with `detach`. Raises
        `AttachError` for an optimizer of other parameters.
        """
        self._check_open("watch")
        if (model := self._model()) is None:
            raise AttachError(
                "watch: the model that attach was called with is gone, and a copy with its reducer trains on; call "
                "detach, and attach the compressor to the copy."
            )
        in_buckets = {parameter for _, parameter in self._named}
        found = [optimizer_of("watch", in_buckets, optimizer) for optimizer in optimizers]
        guard = guard_wrapper(model, self._named)
        self._watches += [Watch(optimizer, guard, in_buckets, self._engine) for optimizer in found]

    def detach(self) -> None:
        """Restore the model's plain all-reduce, and stop the scheduler. A second call does nothing.

        Every rank must detach between the same two steps. PyTorch's DistributedDataParallel only ever accepts one hook,
        so afterwards `attach` works again on the same model but `register_comm_hook` does not.
        """
        try:
            while self._watches:  # they hold parameters
                self._watches.pop().remove()
            if self._socket.engine is self._engine:
                self._socket.release()
                if (model := self._model()) is not None:
                    release_wrapper(model)
        finally:
            self._engine.stop()


def attach(
    model: Module,
    compressor: Compressor | str,
    *,
    policy: PolicyName = "fifo",
    process_group: dist.ProcessGroup | None = None,
    wrap_communicator: WrapCommunicator | None = None,
    hook_timeout: float | None = None,
    scaler: Scaler | None = None,
    residuals: ResidualStorage = "fp32",
    atomic: bool = False,
    guard: GuardMode | None = None,
) -> Attachment:
    """Average the gradients of `model`, ddp_core's or PyTorch's DistributedDataParallel, with `compressor`.

    `model` may also be a wrapper around a DistributedDataParallel: the result of `torch.compile`, of Lightning Fabric's
    `setup`, of Accelerate's `prepare`, or a module that PyTorch's `replicate` was called with.

    Call it on every rank, between the same two backward passes. A string is passed to `make_compressor`.

    - `policy` is the order of collectives: "fifo" proceeds bucket by bucket and overlaps with the backward pass;
      "fused" packs each round of all buckets into one collective, after the last bucket.
    - `process_group` defaults to the model's own. Except with NCCL, a private Gloo group of the same ranks carries all
      requests; if the model's group has another backend or is written in Python, a warning names it, unless this
      argument or the next is given.
    - `wrap_communicator` may wrap another communicator around the real one.
    - `hook_timeout`, in seconds, limits every collective and, under "fused", the wait for a step's next bucket
      (default: the group's timeout).
    - `scaler`, a `torch.amp.GradScaler`: residuals are rescaled when it changes the loss scale.
    - `residuals` is the storage of residuals: "fp32" (fp64 for fp64 gradients), "bf16", or "host", in fp32 in the
      host's memory.
    - `atomic`: a step whose mean holds an inf or a NaN in any bucket changes no state at all. This keeps a second copy
      of the state. Without it, "fused" judges all buckets of a step together, and "fifo" judges each bucket separately.
    - `guard`: what happens before an optimizer steps on gradients of this model that were not averaged, for example
      because the module inside the DDP was called: "raise" `NotAveragedError`, "warn" once, or nothing if "off". None:
      as before, which is "raise" unless `set_guard` or the environment variable DDP_GUARD says otherwise. It ends
      with `detach` for PyTorch's class, and never for ddp_core's. See `docs/guide/guard.md`.

    Raises `AttachError` if a hook is already attached or registered, if the model is not a DistributedDataParallel,
    shards its parameters or is wrapped twice, if its process group has no name or store, or if ranks disagree about
    compressor, policy or parameters; raises `SettingsError` for settings that cannot work.
    """
    ddp = find_ddp("attach", model)
    compressor = checked_compressor("attach", compressor)
    check_run_settings("attach", policy, hook_timeout)
    check_flags("attach", atomic=atomic)
    if guard is not None:
        try:
            check_mode("attach", guard)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    check_hook_is_called("attach", ddp)
    check_step_has_an_end("attach", ddp, policy, atomic=atomic)
    if torch._C._current_graph_task_id() != -1:
        raise AttachError("attach: a backward pass is under way; call attach between two passes.")
    group = group_or_default(process_group if process_group is not None else getattr(ddp, "process_group", None))
    check_is_free("attach", ddp)
    socket = socket_of(ddp)
    named = trained_parameters(model, ddp)
    if not named:
        raise AttachError("attach: no gradient comes in a bucket: every parameter is ignored or delayed.")
    loss_scale = LossScale()
    if scaler is not None:
        loss_scale.follow(scaler)
    line = ProcessGroupLine(
        group,
        policy=policy,
        wrap_communicator=wrap_communicator,
        hook_timeout=hook_timeout,
        may_bypass=process_group is not None or wrap_communicator is not None,
    )
    fingerprint = "\n".join(
        f"parameter {name}: shape {tuple(p.shape)}, {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in named
    )
    engine = Engine(
        compressor, line, fingerprint=fingerprint, residuals=residuals, atomic=atomic, loss_scale=loss_scale
    )
    engine.bind(named, may_be_unused=searches_for_unused(ddp))
    engine.open(named[0][1].device, refusal_of(compressor, dict(named), line))
    _warn_of_loss(compressor, named)
    attachment = Attachment(engine, socket, named, ddp)
    seconds = line.timeout if hook_timeout is None else hook_timeout
    socket.plug_in(attachment, engine, ddp, seconds)
    if guard_wrapper(ddp, named, guard, seconds) is None:
        warnings.warn(_UNGUARDED, stacklevel=2)
    return attachment


_UNGUARDED = (
    "commhooks: this version of PyTorch does not tell when its DistributedDataParallel is done, so steps on gradients "
    "that were not averaged go unnoticed; use ddp_core.DistributedDataParallel, whose guard does not need that."
)


def _warn_of_loss(compressor: Compressor, named: list[tuple[str, Tensor]]) -> None:
    """Warn if a user's own compressor loses the part of a gradient that it does not send, without `WithoutFeedback`.

    Rounding to a narrower dtype loses too little for a warning, and an unbiased compressor loses nothing on average.
    """
    for name, parameter in named if not _is_meant(compressor) else ():
        loss = compressor.loss(name, parameter)
        is_lost = loss is not None and loss.is_worth_keeping and not loss.unbiased
        if is_lost and RESIDUAL not in compressor.state(Place(name, parameter, 1)):
            warnings.warn(
                f"commhooks: {compressor!r} loses what it does not send of {name!r} and other parameters. Wrap it in "
                "ErrorFeedback(inner=...), or in WithoutFeedback(inner=...) if that loss is what you want.",
                stacklevel=3,
            )
            return


def _is_meant(compressor: Compressor) -> bool:
    """Return whether what a compressor loses is meant: its name, or `WithoutFeedback`, says that it keeps nothing."""
    if isinstance(compressor, WithoutFeedback):
        return True
    inner = inner_of(compressor)
    return all(map(_is_meant, inner)) if inner else name_of(compressor) is not None
