"""The options of an exchange: one set, with the same meaning in every way in."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, TypedDict, TypeGuard, get_args

import numpy
import torch.distributed as dist

from commhooks.communicators.private_group import WrapCommunicator
from commhooks.errors import HookTypeError, SettingsError
from commhooks.scheduling.policy import POLICIES, PolicyName
from commhooks.state.loss_scale import LossScale, Scaler
from commhooks.state.table import ResidualStorage
from ddp_core.guard import GuardMode, check_mode


class Options(TypedDict, total=False):
    """The options of `attach`, `attach_sharded`, `attach_replicas`, `Exchanger`, `DiLoCo` and `open_exchange`.

    Each takes those that can apply, and raises `SettingsError` for the others, with the reason.
    """

    policy: PolicyName
    """The order of collectives: "fifo" proceeds bucket by bucket; "fused" packs each round of all buckets of a step
    into one collective, after the last bucket. The default is "fifo" where buckets come during a backward pass, which
    their exchange then overlaps, and "fused" where all tensors come at once: `DEFAULTS` lists them."""
    process_group: dist.ProcessGroup | None
    """The ranks that average together; None: the model's own group, or the default one."""
    hook_timeout: float | None
    """The limit of every collective and, under "fused", of the wait for a step's next bucket, in seconds; None: the
    process group's timeout."""
    scaler: Scaler | None
    """A `torch.amp.GradScaler`: residuals are rescaled when it changes the loss scale."""
    residuals: ResidualStorage
    """The storage of residuals: "fp32" (fp64 for fp64 gradients), "bf16", or "host", in fp32 in the host's memory."""
    atomic: bool
    """A step whose mean holds an inf or a NaN in any bucket changes no state at all. This keeps a second copy of the
    state. Without it, "fused" judges all buckets of a step together, and "fifo" judges each bucket separately."""
    wrap_communicator: WrapCommunicator | None
    """Takes the private group's communicator, and returns the one to use in its place."""
    guard: GuardMode | None
    """What happens before an optimizer steps on gradients that were not averaged: "raise" `NotAveragedError`, "warn"
    once, or nothing if "off". None: as before, which is "raise" unless `set_guard` or the environment variable
    DDP_GUARD says otherwise. It ends with `close` for PyTorch's class, and never for ddp_core's. See
    `docs/guide/guard.md`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one exchange, checked; `Options` describes them."""

    policy: PolicyName
    process_group: dist.ProcessGroup | None = None
    hook_timeout: float | None = None
    scaler: Scaler | None = None
    residuals: ResidualStorage = "fp32"
    atomic: bool = False
    wrap_communicator: WrapCommunicator | None = None
    guard: GuardMode | None = None


DEFAULTS: Mapping[str, PolicyName] = {
    "attach": "fifo",  # a DDP's buckets come during the backward pass
    "attach_sharded": "fifo",  # so do FSDP2's modules
    "attach_replicas": "fused",  # shards are small, and there may be hundreds of modules
    "Exchanger": "fused",  # all tensors come at once
    "DiLoCo": "fused",
    "PowerSGDState": "fifo",
    "open_exchange": "fifo",  # buckets go out as a feed hands them in, so that it may wait for each
}
"""The policy of each way in, by its name; all other options have one default."""

_NO_WRAPPER = "the guard of wrappers belongs to a DistributedDataParallel; use watch()"
_NO_STEP = "no optimizer steps on its means in place of gradients"
CANNOT_APPLY: Mapping[str, Mapping[str, str]] = {
    "attach_sharded": {
        "policy": "FSDP2 waits for each module's gradients, so their order is always that of 'fifo'",
        "process_group": "the mesh that the model is sharded over has it",
        "atomic": "modules are exchanged one by one, and one that is done cannot be undone",
        "guard": _NO_WRAPPER,
    },
    "attach_replicas": {"guard": _NO_WRAPPER},
    "open_exchange": {"guard": _NO_WRAPPER},
    "Exchanger": {"guard": _NO_STEP},
    "DiLoCo": {
        "scaler": "it exchanges how far parameters went, which no loss scale multiplies",
        "guard": "DiLoCo itself notices steps that were not counted",
    },
}
"""What cannot apply to a way in, and why."""


def settings_of(way: str, options: Options, caller: str = "") -> Settings:
    """Return the options of a way in, with its defaults; errors name the caller, if it is another.

    Raises `SettingsError` for a value that cannot work, or for an option that cannot apply, and `HookTypeError` for a
    name that is no option.
    """
    caller = caller or way
    for name in options:
        if name not in Options.__annotations__:
            near = difflib.get_close_matches(name, Options.__annotations__, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise HookTypeError(f"{caller}() got an unexpected keyword argument {name!r}.{hint}")
    given: dict[str, Any] = {"policy": DEFAULTS[way], **options}
    settings = Settings(**given)
    for name, why in CANNOT_APPLY.get(way, {}).items():
        if name in options and getattr(settings, name) != getattr(Settings(policy=DEFAULTS[way]), name):
            raise SettingsError(f"{caller}({name}={getattr(settings, name)!r}): {name} cannot apply: {why}.")
    check_policy(caller, settings.policy)
    check_timeout(caller, settings.hook_timeout)
    check_flags(caller, atomic=settings.atomic)
    if settings.residuals not in get_args(ResidualStorage):
        allowed = ", ".join(get_args(ResidualStorage))
        raise SettingsError(f"{caller}(residuals={settings.residuals!r}): residuals must be one of {allowed}.")
    if settings.wrap_communicator is not None and not callable(settings.wrap_communicator):
        raise SettingsError(
            f"{caller}(wrap_communicator={settings.wrap_communicator!r}): it must be a function of a communicator."
        )
    if settings.guard is not None:
        try:
            check_mode(caller, settings.guard)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    if settings.scaler is not None:
        LossScale().follow(settings.scaler)  # raises for anything else
    return settings


def check_belongs_to_connection(caller: str, options: Options) -> None:
    """Raise `SettingsError` for an option that belongs to the connection that an exchange is given."""
    names = ("process_group", "hook_timeout", "wrap_communicator")
    if given := [name for name in names if options.get(name) is not None]:
        raise SettingsError(f"{caller}: {' and '.join(given)} belong to the connection; pass them to it.")


def check_policy(caller: str, policy: object) -> None:
    """Raise `SettingsError` if the policy does not exist."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise SettingsError(f"{caller}(policy={policy!r}): policy must be one of {', '.join(POLICIES)}.")


def check_timeout(caller: str, hook_timeout: object) -> None:
    """Raise `SettingsError` if the timeout is neither None nor a positive, finite number."""
    number = int | float | numpy.floating | numpy.integer
    is_number = isinstance(hook_timeout, number) and not isinstance(hook_timeout, bool)
    if hook_timeout is not None and not (is_number and 0 < hook_timeout < math.inf):  # type: ignore[operator]  # 'and "object"'
        raise SettingsError(f"{caller}(hook_timeout={hook_timeout!r}): hook_timeout must be above 0 s, and finite.")


def check_flags(caller: str, **flags: object) -> None:
    """Raise `SettingsError` for the first of these settings that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool | numpy.bool_):
            raise SettingsError(f"{caller}({name}={value!r}): {name} must be True or False.")


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a setting is an int, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)
