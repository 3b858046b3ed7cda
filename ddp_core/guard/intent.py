"""What a program says about steps on local gradients: an error, a warning, or on purpose."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ddp_core.errors import ON_PURPOSE, NotAveragedError, NotAveragedWarning

GuardMode = Literal["raise", "warn", "off"]


class Reaction:
    """What is done about steps on a wrapper's local gradients, and what was warned of."""

    def __init__(self) -> None:
        self.mode: GuardMode = _default_mode()
        self.has_warned = False
        self.has_warned_of_silence = False  # that nothing could be proved

    def tell(self, text: str, *, raises: bool) -> None:
        """Raise, or warn once."""
        if raises:
            raise NotAveragedError(f"{text} {ON_PURPOSE}")
        self.has_warned = True
        warn(f"{text} This is said once. {ON_PURPOSE}")

    def tell_of_silence(self, text: str) -> None:
        """Warn, once, that nothing could be proved."""
        if not self.has_warned_of_silence:
            self.has_warned_of_silence = True
            warn(text)


def warn(text: str) -> None:
    """Warn of a step on gradients that were not averaged, or may not have been."""
    warnings.warn(text, NotAveragedWarning, stacklevel=2)


_reactions: weakref.WeakKeyDictionary[Module, Reaction] = weakref.WeakKeyDictionary()


def reaction_of(wrapper: Module) -> Reaction:
    """Return the reaction to steps on a wrapper's gradients; it is there before the guard, and outlives it."""
    if wrapper not in _reactions:
        _reactions[wrapper] = Reaction()
    return _reactions[wrapper]


def _default_mode() -> GuardMode:
    mode: Any = os.environ.get("DDP_GUARD") or "raise"
    check_mode("environment variable DDP_GUARD", mode)
    checked: GuardMode = mode
    return checked


def check_mode(caller: str, mode: object) -> None:
    """Raise ValueError unless ``mode`` is one of the three."""
    if mode not in get_args(GuardMode):
        raise ValueError(f'{caller}: guard must be "raise", "warn" or "off" (got {mode!r})')


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
    reaction = reaction_of(wrapper)
    reaction.mode, reaction.has_warned = mode, False


@contextlib.contextmanager
def local_on_purpose(wrapper: Module) -> Iterator[None]:
    """Judge no step on a wrapper's gradients inside this context: they are not averaged, and steps will be undone."""
    reaction = reaction_of(wrapper)
    mode, reaction.mode = reaction.mode, "off"
    try:
        yield
    finally:
        reaction.mode = mode


local: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that step on local gradients on purpose


def steps_locally(optimizer: Optimizer, is_local: bool = True) -> None:
    """Let ``optimizer`` step on gradients that were not averaged, as local SGD does; False: judge its steps again.

    This is so for the optimizers that it wraps, too, as those of ``torch.distributed.optim`` and of frameworks do.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"steps_locally: expected a torch.optim.Optimizer (got {type(optimizer).__name__})")
    for one in _with_those_inside(optimizer):
        (local.add if is_local else local.discard)(one)


def _with_those_inside(optimizer: Optimizer) -> list[Optimizer]:
    found = [optimizer]
    for one in found:  # which grows
        found += [other for other in vars(one).values() if isinstance(other, Optimizer) and other not in found]
    return found


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
