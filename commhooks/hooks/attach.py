"""Attach a compressor to a DistributedDataParallel: `attach`, and the feed of its buckets."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Set
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.parent_group import group_or_default
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError
from commhooks.exchange.checks import checked_compressor, read_text
from commhooks.exchange.feed import Channel, Feed
from commhooks.exchange.handle import Handle, open_exchange
from commhooks.exchange.options import Options, settings_of
from commhooks.hooks.facts import (
    check_hook_is_called,
    check_step_has_an_end,
    load_plan,
    may_skip_buckets,
    plan_of,
    searches_for_unused,
    sparse_parameters,
    uncut_steps,
)
from commhooks.hooks.hook_functions import attachment_state_of, caller_of_hook, check_is_free
from commhooks.language.compressor import Compressor, inner_of
from commhooks.language.entries import RESIDUAL
from commhooks.language.place import Place
from commhooks.language.text import name_of
from commhooks.saving.saved import ONLY
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.unwrapping import find_ddp, trained_parameters
from commhooks.wrappers.error_feedback import WithoutFeedback
from ddp_core.guard import FOLLOWS_PYTORCH, Guard, GuardMode, guard_wrapper, release_wrapper


def attach(model: Module, compressor: Compressor | str, **options: Unpack[Options]) -> Handle[Channel]:
    """Average the gradients of `model`, ddp_core's or PyTorch's DistributedDataParallel, with `compressor`.

    `model` may also be a wrapper around a DistributedDataParallel: the result of `torch.compile`, of Lightning Fabric's
    `setup`, of Accelerate's `prepare`, or a module that PyTorch's `replicate` was called with.

    Call it on every rank, between the same two backward passes. A string is read as by `make_compressor`, and may say
    the policy too: "powersgd:rank=4,policy=fused". `Options` describes the options, of which all apply: `policy`
    ("fifo"), `process_group`, `hook_timeout`, `scaler`, `residuals`, `atomic`, `wrap_communicator` and `guard`.

    Except with NCCL, a private Gloo group of the same ranks carries all requests; if the model's group has another
    backend or is written in Python, a warning names it, unless `process_group` or `wrap_communicator` is given.

    Raises `AttachError` if a hook is already attached or registered, if the model is not a DistributedDataParallel,
    shards its parameters or is wrapped twice, if its process group has no name or store, or if ranks disagree about
    compressor, options or parameters; raises `SettingsError` for settings that cannot work.
    """
    compressor, options = read_text("attach", compressor, options)
    settings = settings_of("attach", options)
    ddp = find_ddp("attach", model)
    check_hook_is_called("attach", ddp)
    check_step_has_an_end("attach", ddp, settings.policy, atomic=settings.atomic)
    if torch._C._current_graph_task_id() != -1:
        raise AttachError("attach: a backward pass is under way; call attach between two passes.")
    feed = DDPFeed(model, ddp, settings.guard)
    compressor = checked_compressor("attach", compressor)
    # Before the hook is there: a warning may be an error.
    _warn_of_loss(compressor, feed.named)
    if isinstance(ddp, torch.nn.parallel.DistributedDataParallel) and not FOLLOWS_PYTORCH:
        warnings.warn(_UNGUARDED, stacklevel=2)
    return open_exchange(feed, compressor, **options)


class DDPFeed(Feed):
    """The buckets of a DistributedDataParallel: state is kept for its parameters, by name, and its hook calls."""

    caller = way = "attach"
    label = "attached"
    may_join = True

    def __init__(self, model: Module, ddp: Module, guard: GuardMode | None) -> None:
        check_is_free("attach", ddp)
        self._state = attachment_state_of(ddp)
        self._ddp = weakref.ref(ddp)  # a handle must not keep its model alive
        self._hook_caller = weakref.ref(caller_of_hook(ddp))
        self._engine: Engine | None = None
        self._guard_mode = guard
        self.named: list[tuple[str, Tensor]] = trained_parameters(model, ddp)
        """The parameters whose gradients come in buckets, with their names."""
        if not self.named:
            raise AttachError("attach: no gradient comes in a bucket: every parameter is ignored or delayed.")
        self.sparse: Set[Tensor] = sparse_parameters(ddp)
        self.may_be_unused: bool = searches_for_unused(ddp)
        self.uncut_steps: int = uncut_steps(ddp)
        self.joins_buckets: bool = not may_skip_buckets(ddp)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The model's own group."""
        return group_or_default(getattr(self._ddp(), "process_group", None))

    def like(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the parameters, by name."""
        return {ONLY: dict(self.named)}

    def plug(self, channels: Mapping[str, Any]) -> None:
        """Register the hook on the model, unless it still is."""
        ddp, engine = self._ddp(), channels[ONLY].engine
        assert ddp is not None and isinstance(engine.connection, ProcessGroupConnection), (
            "attach holds it, and makes no other"
        )
        self._engine = engine
        connection: ProcessGroupConnection = engine.connection
        seconds = connection.timeout if connection.hook_timeout is None else connection.hook_timeout
        self._state.plug_in(engine, ddp, seconds)
        guard_wrapper(ddp, self.named, self._guard_mode, seconds)

    def unplug(self) -> None:
        """Restore the model's plain all-reduce."""
        if self._engine is not None and self._state.engine is self._engine:
            self._state.release()
            if (ddp := self._ddp()) is not None:
                release_wrapper(ddp)

    @property
    def is_plugged(self) -> bool:
        """True while the model's gradients go through the engine: until `unplug`, or until the model is gone."""
        return self._engine is not None and self._state.engine is self._engine and self._hook_caller() is not None

    def averaged_by(self, channel: Channel) -> Mapping[Tensor, str]:
        """Return the parameters."""
        self._held()
        return {parameter: name for name, parameter in self.named}

    def guard_of(self, channel: Channel) -> Guard | None:
        """Return the wrapper's guard."""
        return guard_wrapper(self._held(), self.named)

    def _held(self) -> Module:
        if (ddp := self._ddp()) is None:
            raise AttachError(
                "watch: the model that attach was called with is gone, and a copy with its reducer trains on; call "
                "close, and attach the compressor to the copy."
            )
        return ddp

    def bucket_plan(self) -> dict[str, Any]:
        """Return ddp_core's layout of buckets; PyTorch's class has none to be saved."""
        return plan_of(self._ddp())

    def load_bucket_plan(self, plan: Mapping[str, Any]) -> None:
        """Make ddp_core's DDP lay out its buckets as they were when they were saved."""
        load_plan(self._ddp(), plan)


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
    is_ours = type(compressor).__module__.startswith("commhooks.")
    inner = inner_of(compressor)
    return is_ours and all(map(_is_meant, inner)) if inner else name_of(compressor) is not None
