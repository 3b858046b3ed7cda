"""The guard: no optimizer steps on gradients of a wrapped model that were not averaged, without a word.

Suspicion is cheap and local. Each wrapper has a log of the parameters whose gradient came outside a reduction,
or after one; the end of a reduction empties it, because a reduction averages all that ``p.grad`` holds. A step is
suspect if a parameter that it changes is in the log, if it runs in a backward pass whose means are not there yet, if no
reduction has ended since the optimizer's last step, or if a parameter of the model is not known to the reducer.

Proof costs only then: ranks compare fingerprints of the gradients through the store (``proof.py``). Equal ones are
averaged by hand, or come from the same data; others raise `NotAveragedError`, or warn.

The reducer of ddp_core says itself what it did. PyTorch's is followed from outside, with public hooks of PyTorch and
the names in ``PRIVATE_NAMES``: parameters report their gradients, and the communication hook that its buckets.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_core.alone import warn_of_one_rank
from ddp_core.errors import ON_PURPOSE, NotAveragedError, NotAveragedWarning
from ddp_core.hooks import timeout_of
from ddp_core.outside import Outside
from ddp_core.proof import (
    AbsentError,
    Gradient,
    UnansweredError,
    compare,
    fingerprints,
    is_plain,
    numbered,
    shared_store,
)

__all__ = [
    "Guard",
    "GuardMode",
    "NotAveragedError",
    "NotAveragedWarning",
    "WrapperGuard",
    "check_mode",
    "guard_wrapper",
    "hook_ran",
    "is_standing",
    "local_on_purpose",
    "notice_wrappers",
    "release_wrapper",
    "set_guard",
    "steps_locally",
    "warn_of_one_rank",
]

GuardMode = Literal["raise", "warn", "off"]

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
VARIABLE = "DDP_GUARD"
"""The environment variable with the mode of all guards for which the program sets none."""

ROUNDS_IN_LOG = 4
"""A log holds so many gradients of each parameter. Once it is full, every parameter is suspect."""

_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass


class Guard:
    """What is known of some parameters' gradients, and of the optimizers that step on them.

    This class counts reductions, and judges the optimizers that `watch` is called with: strictly, on suspicion alone.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], title: str) -> None:
        self.title = title  # of the model, in errors
        named = list(named)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]  # kept alive, so that their ids stay theirs
        self.index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.log: deque[Tensor] = deque(maxlen=max(1, ROUNDS_IN_LOG * len(named)))
        self._ended_reductions = 0
        self._stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._watched: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[Any, int]]] = weakref.WeakKeyDictionary()
        """For each watched optimizer, the gradients of its last step, and their versions."""
        _install()

    @property
    def reductions(self) -> int:
        """The number of reductions that have ended."""
        return self._ended_reductions

    def remove(self) -> None:
        """Judge no step any more."""
        self.log.clear()
        _watching.discard(self)

    def watch(self, optimizer: Optimizer) -> None:
        """Raise before a step of ``optimizer`` on suspicion alone, in any mode, even if all ranks would agree."""
        _watching.add(self)
        self._watched[optimizer] = {}
        self._stepped[optimizer] = self.reductions

    def judges(self, optimizer: Optimizer) -> bool:
        """Return True if steps of ``optimizer`` may raise or warn."""
        return optimizer in self._watched

    def unwatch(self, optimizer: Optimizer) -> None:
        """End `watch`."""
        self._watched.pop(optimizer, None)

    def logged(self) -> list[Tensor]:
        """Return the parameters in the log, each once; all of them, if it is full and may have lost some."""
        if len(self.log) == self.log.maxlen:
            return self.parameters
        return list({id(parameter): parameter for parameter in self.log}.values())

    def ranks(self) -> tuple[int, int]:
        """Return this process's rank among those that average together, and their number."""
        raise NotImplementedError

    def has_peers(self) -> bool:
        """Return False once nobody is left to average with."""
        return True

    def who(self) -> str:
        """Return this process's rank in words."""
        return f"rank {self.ranks()[0]}"

    def cause(self, optimizer: Optimizer, known: bool, within: bool) -> str:
        """Return the likely cause of a step on local gradients, and a remedy."""
        raise NotImplementedError

    def require_finished(self) -> None:
        """Raise the reducer's own error if a reduction began and has not ended."""

    def means_are_missing(self, task: int) -> bool:
        """Return True in a backward pass, numbered ``task``, that ends in a reduction which has not ended yet."""
        return False  # where gradients are averaged one by one, before they are accumulated

    def judge(self, optimizer: Optimizer, held: set[int], task: int, verb: str) -> None:
        """Raise or warn if a step of ``optimizer`` is on local gradients; ``held`` are its parameters' ids."""
        if self.judges(optimizer):
            within = self.means_are_missing(task)
            stale = self._stepped.get(optimizer, 0) == self.reductions  # gradients by hand, or the last step's
            if within or stale or self.log:
                self._suspect(optimizer, held, within, stale, verb)
            self._stepped[optimizer] = self.reductions

    def _suspect(self, optimizer: Optimizer, held: set[int], within: bool, stale: bool, verb: str) -> None:
        candidates = self.parameters if within or stale else self.logged()
        suspects = [p for p in candidates if id(p) in held and p.grad is not None]
        used = self._watched.get(optimizer)
        if used is not None and stale and not within:  # a second step on the same means is no bypass
            logged = {id(p) for p in self.logged()}
            suspects = [p for p in suspects if id(p) in logged or not _is_same(p, used)]
        if suspects:
            self.accuse(optimizer, [(self.names[self.index[id(p)]], p) for p in suspects], held, verb, within)

    def accuse(
        self,
        optimizer: Optimizer,
        suspects: Sequence[tuple[str, Tensor]],
        held: set[int],
        verb: str,
        within: bool = False,
    ) -> None:
        """Raise or warn, unless the step changes nothing or gradients turn out to be the same on all ranks."""
        if not self.judges(optimizer) or not self.has_peers() or is_standing(optimizer):
            return
        first = next((place for place, (_, p) in enumerate(suspects) if _is_used(p)), None)
        if first is None:
            return
        suspects = suspects[first:]  # the others are looked at only if there is something to tell
        known = id(suspects[0][1]) in self.index
        if known and not within:
            self.require_finished()
        if optimizer in self._watched:
            names = [name for name, p in suspects if _is_used(p)]
            raise NotAveragedError(self._text(optimizer, verb, names, known, within))
        self.prove(optimizer, suspects, held, functools.partial(self._text, optimizer, verb, within=within))

    def prove(
        self, optimizer: Optimizer, suspects: Sequence[tuple[str, Tensor]], held: set[int], text: Callable[..., str]
    ) -> None:
        """Compare suspect gradients with those of the other ranks, and raise or warn if they differ."""
        raise NotImplementedError  # a guard that watches only has raised by now

    def _text(self, optimizer: Optimizer, verb: str, names: Sequence[str], known: bool, within: bool) -> str:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"{type(optimizer).__name__} {verb} a step on gradients of {self.title} that were not averaged: "
            f"{names[0]!r}{more} on {self.who()}, so replicas drift apart. "
            f"Likely cause: {self.cause(optimizer, known, within)}."
        )

    def note_step(self, optimizer: Optimizer) -> None:
        """Remember the gradients that a watched optimizer has used."""
        if optimizer in self._watched:
            self._watched[optimizer] = {
                id(p): (weakref.ref(p.grad), p.grad._version)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            }


class WrapperGuard(Guard):
    """The guard of a DistributedDataParallel, ddp_core's or PyTorch's.

    ``limit``: seconds to wait for ranks that are late; None: the process group's timeout.
    ``is_copy``: whether other ranks may have made fewer such wrappers, since a copy needs nobody else.
    """

    def __init__(
        self, wrapper: Any, named: Iterable[tuple[str, Tensor]], *, listens: bool, is_copy: bool = False
    ) -> None:
        super().__init__(named, type(wrapper.module).__name__)
        self.limit: float | None = None
        self.mode: GuardMode = _modes.get(wrapper) or _default_mode()
        self._wrapper = weakref.ref(wrapper, lambda _: self.remove())
        self._suspicions: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        """For each optimizer, its suspicions, and the one at which gradients are compared next."""
        self._comparisons = 0
        self._was_ready = dist.is_available() and dist.is_initialized()
        self._warned = self._warned_of_silence = False
        self._at_last_step = 0  # of any optimizer: the number of reductions
        self._pass = -1  # the backward pass in which the hook was called
        self._skips = getattr(wrapper, "skip_all_reduce_unused_params", False)
        self._reduced: set[int] = set()  # ids of the parameters in its buckets so far, if some may be skipped
        self.finished = -1  # the backward pass whose means are there
        shapes = [(name, tuple(parameter.shape)) for name, parameter in zip(self.names, self.parameters, strict=True)]
        self._key = numbered(wrapper.process_group, f"{'copy of ' if is_copy else ''}{self.title} {shapes}")
        self.listens = listens  # to parameters, because the reducer, PyTorch's, does not report
        self._handles = [_listen(parameter, self.log.append) for parameter in self.parameters] if listens else []
        self._sharing = [one for one in _of_wrappers.values() if not self.index.keys().isdisjoint(one.index)]
        for other in self._sharing:
            other._sharing.append(self)
        _unguarded.pop(wrapper, None)
        _of_wrappers[wrapper] = self
        _refresh()

    def remove(self) -> None:
        """Judge no step any more, and listen to no gradient."""
        while self._handles:
            self._handles.pop().remove()
        for other in self._sharing:
            other._sharing.remove(self)
        self._sharing = []
        super().remove()
        _refresh()

    @property
    def wrapper(self) -> Any:
        """The DistributedDataParallel; None once it is gone."""
        return self._wrapper()

    def ranks(self) -> tuple[int, int]:
        """Return this process's rank among those that average together, and their number."""
        group = self.wrapper.process_group
        return group.rank(), group.size()

    # ---------------------------------------------------------------- what reducers report

    def launched(self, bucket: GradBucket) -> None:
        """Note that PyTorch's reducer has passed a bucket to its hook: this pass will end in a reduction."""
        task = _graph_task()
        if self._skips:
            self._reduced.update(map(id, bucket.parameters()))
        if task not in (-1, self._pass):  # -1: on a rank that has joined
            self._pass = task
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._ended))  # twice: the reducer queues its own with the last bucket, after this one

    def _ended(self) -> None:
        self._pass = -1
        if self.wrapper is None:
            return
        try:
            self.wrapper.reducer._check_reducer_finalized()
        except RuntimeError:  # a bucket is missing, and nothing was written back: the next forward pass says so
            return
        reduced, self._reduced = self._reduced, set()
        self.averaged([p for p in self.parameters if id(p) not in reduced] if reduced else ())

    def averaged(self, skipped: Sequence[Tensor] = ()) -> None:
        """Note that all that ``p.grad`` holds is averaged, including what had accumulated before.

        ``skipped`` are the parameters of buckets that were not reduced, since this pass did not use them.
        """
        left_out = set(map(id, skipped))
        local = [parameter for parameter in self.logged() if id(parameter) in left_out] if left_out else ()
        self.log.clear()
        self.log.extend(local)
        self._ended_reductions += 1
        self.finished = _graph_task()
        for other in self._sharing:
            kept = [parameter for parameter in other.logged() if id(parameter) not in self.index]
            other.log.clear()
            other.log.extend(kept)

    # ---------------------------------------------------------------- suspicion and proof

    def judges(self, optimizer: Optimizer) -> bool:
        """Return True if steps of ``optimizer`` may raise or warn."""
        return (self.mode != "off" and self.ranks()[1] > 1) or super().judges(optimizer)

    def has_peers(self) -> bool:
        """Return False once the process group is destroyed: its ranks train on by themselves."""
        if not self._was_ready:
            return True  # a group that torch.distributed does not know
        return dist.is_initialized()

    def who(self) -> str:
        """Return this process's rank in words, and its rank in the wrapper's group if that is another."""
        own = self.ranks()[0]
        rank = dist.get_rank() if self._was_ready and dist.is_initialized() else own
        return f"rank {rank}" if rank == own else f"rank {rank} (rank {own} of the wrapper's process group)"

    def judge(self, optimizer: Optimizer, held: set[int], task: int, verb: str) -> None:
        """Raise or warn if a step of ``optimizer`` is on local gradients; ``held`` are its parameters' ids."""
        super().judge(optimizer, held, task, verb)
        self._at_last_step = self.reductions

    def means_are_missing(self, task: int) -> bool:
        """Return True in a backward pass, numbered ``task``, that ends in a reduction which has not ended yet."""
        return task not in (-1, self.finished)

    def require_finished(self) -> None:
        """Raise the reducer's own error if a reduction began and has not ended."""
        reducer: Any = self.wrapper.reducer
        (reducer._check_reducer_finalized if self.listens else reducer.require_finished)()

    def cause(self, optimizer: Optimizer, known: bool, within: bool) -> str:
        """Return the likely cause of a step on local gradients, and a remedy."""
        wrapper = self.wrapper
        if not known:
            return "it was frozen when the model was wrapped, or added or replaced afterwards; wrap the model again"
        if within:
            return "the optimizer steps in a gradient's hook, before the mean is there; step after the backward pass"
        if not wrapper.require_backward_grad_sync:
            return "the last backward pass before the step ran inside no_sync()"
        if not wrapper.require_forward_param_sync:  # set by any forward pass, with or without a backward pass
            return (
                "the last pass through the wrapper ran inside no_sync(), or inside no_grad() before the module in the "
                "wrapper was called"
            )
        if self.reductions > self._at_last_step:
            return (
                "a backward pass that was averaged was followed by one that was not; call the wrapper once for each "
                "backward pass, and never the module inside it"
            )
        return "the module inside the wrapper was called; call the wrapper"

    def prove(
        self, optimizer: Optimizer, suspects: Sequence[tuple[str, Tensor]], held: set[int], text: Callable[..., str]
    ) -> None:
        """Compare suspect gradients with those of the other ranks, and raise or warn if they differ.

        Gradients that were the same are compared again at twice as many suspicions of the same optimizer.
        """
        wrapper = self.wrapper
        if self._warned and (self.mode == "warn" or not wrapper.require_backward_grad_sync):
            return
        suspicions, due = self._suspicions.get(optimizer, (0, 1))
        suspicions += 1
        self._suspicions[optimizer] = suspicions, due
        if suspicions < due:
            return
        self._comparisons += 1
        suspects = [(name, p) for name, p in suspects if _is_used(p)]
        says = functools.partial(text, known=id(suspects[0][1]) in self.index)
        try:
            names = self._compare(suspects, held, says([name for name, _ in suspects]))
        except AbsentError as error:
            self._tell(f"{says([name for name, _ in suspects])} Gradients could not be compared: {error}.")
            return
        except UnansweredError as error:
            if not self._warned_of_silence:
                self._warned_of_silence = True
                _warn(f"{says([name for name, _ in suspects])} This could not be proved: {error}.")
            return
        if names is None:
            self._suspicions[optimizer] = suspicions, 2 * suspicions
        else:
            self._tell(says(names or [name for name, _ in suspects]))

    def _compare(self, suspects: Sequence[tuple[str, Tensor]], held: set[int], text: str) -> list[str] | None:
        group = self.wrapper.process_group
        parameters = dict([*zip(self.names, self.parameters, strict=True), *suspects])
        store = shared_store(group)
        if store is None:
            raise UnansweredError("the process group has no store in which ranks could compare gradients")
        suspect = {id(parameter) for _, parameter in suspects}
        prints = fingerprints([parameter.grad for parameter in parameters.values()])
        if not any(one and id(p) in suspect for one, p in zip(prints, parameters.values(), strict=True)):
            raise UnansweredError("gradients are of a subclass of Tensor")
        mine = {
            name: Gradient(one, held=id(parameter) in held, suspect=id(parameter) in suspect)
            for (name, parameter), one in zip(parameters.items(), prints, strict=True)
        }
        key = f"ddp_core/guard/{self._key}/{self._comparisons}"
        late = functools.partial(_warn_of_late, text, self.who())
        return compare(store, key, group.rank(), group.size(), mine, self._limit(), late)

    def _limit(self) -> float:
        group, hook = self.wrapper.process_group, getattr(self.wrapper.reducer, "hook", None)
        limits = (self.limit, getattr(hook, "timeout", None), timeout_of(group, self.parameters[0].device))
        return next(limit for limit in limits if limit is not None)

    def _tell(self, text: str) -> None:
        if self.mode == "raise" and self.wrapper.require_backward_grad_sync:
            raise NotAveragedError(f"{text} {ON_PURPOSE}")
        self._warned = True
        _warn(f"{text} This is said once. {ON_PURPOSE}")


def _warn(text: str) -> None:
    warnings.warn(text, NotAveragedWarning, stacklevel=2)


def _warn_of_late(text: str, who: str, seconds_left: float) -> None:
    _warn(
        f"{who[:1].upper()}{who[1:]} waits for the other ranks, to compare gradients with theirs: no reduction has "
        f"averaged its own. It raises if some rank does not come within another {seconds_left:.0f} s; a rank may be "
        f"late, or its gradients were averaged. What this rank would say: {text}"
    )


_of_wrappers: weakref.WeakKeyDictionary[Module, WrapperGuard] = weakref.WeakKeyDictionary()
_watching: weakref.WeakSet[Guard] = weakref.WeakSet()  # those that watch some optimizer
_known: set[int] = set()  # the ids of all parameters in wrappers with a guard
_unguarded: weakref.WeakKeyDictionary[Module, list[tuple[str, Tensor]]] = weakref.WeakKeyDictionary()
"""PyTorch's wrappers without a guard, with the parameters in their buckets."""
_modes: weakref.WeakKeyDictionary[Module, GuardMode] = weakref.WeakKeyDictionary()
_local: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_outside: weakref.WeakKeyDictionary[Optimizer, Outside] = weakref.WeakKeyDictionary()
_is_ours: list[Callable[[Any, Any], bool]] = []


# -------------------------------------------------------------------- for programs


def set_guard(wrapper: Module, mode: GuardMode) -> None:
    """Set what happens before a step on gradients of a DistributedDataParallel that were not averaged.

    ``"raise"``: NotAveragedError. ``"warn"``: NotAveragedWarning, once. ``"off"``: nothing is compared. The wrapper is
    ddp_core's, or PyTorch's if commhooks is attached to it or one of its hooks is registered on it. Raises ValueError
    for another mode, and TypeError for something that is no DistributedDataParallel.
    """
    check_mode("set_guard", mode)
    wrapper = getattr(wrapper, "_orig_mod", wrapper)  # torch.compile's
    if not hasattr(wrapper, "require_backward_grad_sync") or not isinstance(wrapper, Module):
        raise TypeError(f"set_guard: expected a DistributedDataParallel (got {type(wrapper).__name__})")
    _modes[wrapper] = mode
    if wrapper in _of_wrappers:
        _of_wrappers[wrapper].mode, _of_wrappers[wrapper]._warned = mode, False


def steps_locally(optimizer: Optimizer, is_local: bool = True) -> None:
    """Let ``optimizer`` step on gradients that were not averaged, as local SGD does; False: judge its steps again.

    This is so for the optimizers that it wraps, too, as those of ``torch.distributed.optim`` and of frameworks do.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"steps_locally: expected a torch.optim.Optimizer (got {type(optimizer).__name__})")
    for one in _with_those_inside(optimizer):
        (_local.add if is_local else _local.discard)(one)


def _with_those_inside(optimizer: Optimizer) -> list[Optimizer]:
    found = [optimizer]
    for one in found:  # which grows
        found += [other for other in vars(one).values() if isinstance(other, Optimizer) and other not in found]
    return found


def check_mode(caller: str, mode: object) -> None:
    """Raise ValueError unless ``mode`` is one of the three."""
    if mode not in get_args(GuardMode):
        raise ValueError(f'{caller}: guard must be "raise", "warn" or "off" (got {mode!r})')


def is_standing(optimizer: Optimizer) -> bool:
    """Return True if all learning rates are 0, so that a step changes no parameter.

    ``torch.distributed.checkpoint`` takes such a step to make an optimizer create its state. An optimizer whose rate is
    None chooses its own. A rate on a GPU counts as not 0, without being read: the host would wait for it, and reading
    fails during graph capture.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    return not any(
        rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu") or float(rate) for rate in rates
    )


# -------------------------------------------------------------------- for hooks


def notice_wrappers(is_ours: Callable[[Any, Any], bool]) -> None:
    """Guard each DistributedDataParallel of PyTorch with a hook and state for which ``is_ours`` returns True.

    A hook is told no module, so wrappers are noticed as they are made, by PyTorch's public hook for submodules.
    """
    _is_ours.append(is_ours)
    if len(_is_ours) == 1 and FOLLOWS_PYTORCH:
        register_module_module_registration_hook(_noticed)
        _install()
        if dist.is_available() and dist.is_initialized():  # some may have been made before
            for wrapper in [one for one in gc.get_objects() if type(one) is PyTorchDDP]:
                _noticed(wrapper, "module", wrapper.module)


@contextlib.contextmanager
def local_on_purpose(wrapper: Module) -> Iterator[None]:
    """Judge no step on a wrapper's gradients inside this context: they are not averaged, and steps will be undone."""
    mode, guard = _modes.get(wrapper), _of_wrappers.get(wrapper)
    mode_of_guard = guard.mode if guard is not None else None
    set_guard(wrapper, "off")
    try:
        yield
    finally:
        del _modes[wrapper]
        if mode is not None:
            _modes[wrapper] = mode
        if guard is not None and mode_of_guard is not None:
            guard.mode = mode_of_guard


def hook_ran(bucket: Any) -> None:
    """Note that a hook has received a bucket, in whatever wrapper of PyTorch's it is registered."""
    if not isinstance(bucket, GradBucket) or not (_of_wrappers or _unguarded):
        return
    listening = [guard for guard in _of_wrappers.values() if guard.listens]
    guard = listening[0] if len(listening) == 1 and not _unguarded else _guard_of_bucket(bucket, listening)
    if guard is not None:
        guard.launched(bucket)


def guard_wrapper(
    wrapper: Module,
    named: Iterable[tuple[str, Tensor]],
    mode: GuardMode | None = None,
    limit: float | None = None,
    *,
    is_copy: bool = False,
) -> WrapperGuard | None:
    """Return the guard of a wrapper, which gets one if it has none; ``named`` are the parameters in its buckets.

    ``is_copy``: see `WrapperGuard`.
    None if the wrapper is PyTorch's, and this version does not have what following it needs.
    """
    if mode is not None:
        _modes[wrapper] = mode
    guard = _of_wrappers.get(wrapper)
    if guard is None:
        is_pytorchs = isinstance(wrapper, PyTorchDDP)
        if is_pytorchs and not FOLLOWS_PYTORCH:
            return None
        guard = WrapperGuard(wrapper, named, listens=is_pytorchs, is_copy=is_copy)
    guard.mode = _modes.get(wrapper) or guard.mode
    guard.limit = guard.limit if limit is None else limit
    return guard


def release_wrapper(wrapper: Module) -> None:
    """Guard a wrapper of PyTorch's no more, and listen to none of its gradients, until one of our hooks runs in it."""
    guard = _of_wrappers.get(wrapper)
    if guard is not None and guard.listens:
        del _of_wrappers[wrapper]
        guard.remove()
        _unguarded[wrapper] = list(zip(guard.names, guard.parameters, strict=True))


def _guard_of_bucket(bucket: GradBucket, listening: list[WrapperGuard]) -> WrapperGuard | None:
    parameter = bucket.parameters()[0]
    for wrapper, named in list(_unguarded.items()):
        if any(one is parameter for _, one in named) and wrapper.require_backward_grad_sync:
            listening = [*listening, WrapperGuard(wrapper, named, listens=True)]
    mine = [guard for guard in listening if id(parameter) in guard.index]
    return next((guard for guard in mine if guard.wrapper.require_backward_grad_sync), None)


# -------------------------------------------------------------------- process-wide hooks


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _noticed(module: Module, name: str, child: Module | None) -> None:
    if name == "module" and isinstance(module, PyTorchDDP) and child is not None:
        ignored = getattr(child, "_ddp_params_and_buffers_to_ignore", ())
        _unguarded[module] = [(n, p) for n, p in child.named_parameters() if p.requires_grad and n not in ignored]


def _adopt() -> None:
    """Guard the wrappers of PyTorch's on which a hook of ours is registered by now."""
    for wrapper, named in list(_unguarded.items()):
        hooks = getattr(wrapper, "_comm_hooks", ())
        if any(is_ours(hook, state) for hook, state in hooks for is_ours in _is_ours):
            guard_wrapper(wrapper, named)


@_disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _has_closure(args, kwargs):
        _check(optimizer, "is about to take")


@_disable_dynamo
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _has_closure(args, kwargs):
        _check(optimizer, "took")
    for guard in list(_watching):
        guard.note_step(optimizer)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return True if the backward pass runs inside the step."""
    return bool(args or kwargs) and any(map(callable, (*args, *kwargs.values())))


def _check(optimizer: Optimizer, verb: str) -> None:
    if _unguarded:
        _adopt()
    if not (_of_wrappers or _watching) or optimizer in _local:
        return
    task, lists = _graph_task(), [group["params"] for group in optimizer.param_groups]
    held: set[int] = set()
    for params in lists:
        held.update(map(id, params))
    if _of_wrappers and not held <= _known:
        _judge_unknown(optimizer, [p for params in lists for p in params if id(p) not in _known], held, verb)
    guards: list[Guard] = list(_of_wrappers.values())  # in the order of wrapping, which is the same on all ranks
    guards += [guard for guard in _watching if not isinstance(guard, WrapperGuard)]
    for guard in guards:
        guard.judge(optimizer, held, task, verb)


def _judge_unknown(optimizer: Optimizer, unknown: Sequence[Tensor], held: set[int], verb: str) -> None:
    guards = [guard for guard in _of_wrappers.values() if guard.judges(optimizer)]
    outside = _outside.get(optimizer)
    judged = outside.known if outside is not None else {}
    elsewhere = {id(parameter) for named in _unguarded.values() for _, parameter in named}
    new = [p for p in unknown if p.grad is not None and id(p) not in elsewhere]
    new = [p for p in new if not (id(p) in judged and judged[id(p)]() is p)]
    for guard in guards if new else ():
        wrapper = guard.wrapper
        names = {id(p): name for name, p in wrapper.module.named_parameters()}
        left_out = [(names[id(p)], p) for p in new if names.get(id(p), "") not in ("", *wrapper.parameters_to_ignore)]
        new = [p for p in new if id(p) not in names]
        if left_out:
            guard.accuse(optimizer, left_out, held, verb)
    judging = [  # not those that only watch
        guard for guard in guards if guard.mode != "off" and guard.ranks()[1] > 1 and guard.has_peers()
    ]
    if not judging or is_standing(optimizer):
        return
    new = [p for p in new if is_plain(p)]
    if outside is None and new:
        outside = _outside[optimizer] = Outside()
    if outside is not None:
        outside.step(optimizer, new, judging[0].wrapper.process_group)


# -------------------------------------------------------------------- small things


def _listen(parameter: Tensor, append: Callable[[Tensor], None]) -> Any:
    frozen = not parameter.requires_grad  # such a one cannot be listened to
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(append)  # a C function: no Python frame for each gradient
    parameter.requires_grad_(not frozen)
    return handle


def _is_same(parameter: Tensor, used: dict[int, tuple[Any, int]]) -> bool:
    """Return True if the last step used this gradient, and nothing has changed it since."""
    gradient, version = used.get(id(parameter), (_nothing, -1))
    grad = parameter.grad
    return grad is not None and grad is gradient() and grad._version == version


def _nothing() -> None:
    """Return None, as a dead reference does."""


def _is_used(parameter: Tensor) -> bool:
    """Return True if a step changes the parameter, as far as its gradient says."""
    gradient = parameter.grad
    if gradient is None:
        return False
    if hasattr(gradient, "to_local"):  # a DTensor's: this rank steps on its shard
        gradient = gradient.to_local()
    if not is_plain(gradient):
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False  # the host must not ask while a graph is captured
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.count_nonzero())


def _default_mode() -> GuardMode:
    mode: Any = os.environ.get(VARIABLE) or "raise"
    check_mode(f"environment variable {VARIABLE}", mode)
    checked: GuardMode = mode
    return checked


def _refresh() -> None:
    _known.clear()
    for guard in _of_wrappers.values():
        _known.update(guard.index)
