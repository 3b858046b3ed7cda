"""The measurements for a simulation: profiles of a task in one process as one of 2 to 16 ranks, and payloads of more.

Collectives are answered at once, so no other rank is needed. As one of more ranks, only the payloads are counted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from commhooks.errors import CommHooksError

from ..hooks import make_hook, policy_of
from ..launch import Send, run_world
from ..links.link import LinkSettings
from ..machine import versions
from ..planning.profiling import Asked as ProfileAsked
from ..planning.profiling import check_asked, profile_step, stepper
from ..predicting import stored
from ..predicting.candidates import label_in_profile
from ..predicting.link import Link
from ..predicting.payloads import rounds_of
from ..predicting.predicting import predict
from ..predicting.profiles import Profile
from ..predicting.series import Counted, Payloads, Series, is_constant
from ..specs import Spec
from ..tasks import load_task
from ..training.lockstep import own_gradients

RANKS = (2, 4, 8, 16)
FORMAT = 2  # of the file; until 1, compression was timed among workers, without steps
_TIMEOUT_SECONDS = 600.0
_COPIES = 8  # of the gradients that must fit into memory for each rank: state, buckets, messages, answers
_LARGEST_ANSWER = 2e9  # bytes; what would be gathered from more ranks is not counted


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a measurement."""

    task: Spec
    hooks: tuple[Spec, ...]
    ranks: tuple[int, ...] = ()  # numbers of ranks for which payloads are counted
    as_ranks: tuple[int, ...] = RANKS  # numbers of ranks for which compression is timed, as far as memory allows
    steps: int = 9  # of each hook as one of each number of ranks; higher: steadier medians
    cores: int = 1  # cores that the process may use; more: the worker thread has one of its own
    bucket_cap_mb: float | None = None
    seed: int = 0

    @property
    def profile(self) -> ProfileAsked:
        """The request of each profile."""
        return ProfileAsked(
            task=self.task,
            hooks=self.hooks,
            link=LinkSettings(),
            bucket_cap_mb=self.bucket_cap_mb,
            steps=self.steps,
            seed=self.seed,
        )


def measure(asked: Asked, tell: Callable[[str], None]) -> Series:
    """Return the measurements, made in a new process.

    Raises:
        ValueError: There is no such task or hook, or it does not accept the task's parameters.
        WorldError: The measuring process failed.

    """
    check_asked(asked.profile)
    found: list[Series] = []

    def hear(message: object) -> None:
        if isinstance(message, Series):
            found.append(message)
        else:
            tell(str(message))

    run_world(_measure_all, 1, asked, hear, timeout=_TIMEOUT_SECONDS)
    return found[-1]


def write_series(series: Series, path: Path) -> None:
    """Write the file, completely or not at all."""
    stored.write(series, path, form=FORMAT)


def read_series(path: Path) -> Series:
    """Return the measurements in a file.

    Raises:
        ValueError: There is no such file, or no step times can be computed from it.

    """
    try:
        series = stored.read(Series, path, form=FORMAT)
        for ranks in (2, 3, 10_000):
            profile = series.at(ranks)
            for hook in profile.hooks.values():
                predict(profile, hook, Link(rate=1e9))
    except (OSError, ValueError, LookupError, TypeError, CommHooksError) as error:
        raise ValueError(
            f"measured {path}: expected a file of format {FORMAT} that 'commhooks simulate --save' wrote "
            f"({type(error).__name__}: {error}); measure again with --task and --save"
        ) from error
    return series


def _measure_all(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cores])
    profiles = []
    with stepper(asked.profile) as step:
        for number in _that_fit(asked.as_ranks, step.ddp):
            send(f"measuring {step.task.name} as one of {number} ranks")
            profile = profile_step(step, asked.profile, as_ranks=number)
            profiles.append(dataclasses.replace(profile, versions=versions()))
        _, (gradients,) = own_gradients(load_task(asked.task, asked.seed), 0, 1)
    counted = [one for spec in asked.hooks for one in _counted(spec, profiles, gradients, asked)]
    send(Series(tuple(profiles), tuple(counted)))


def _that_fit(numbers: Sequence[int], model: nn.Module) -> list[int]:
    """Return the numbers of ranks whose answers and state fit into free memory; if none do, the least number."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    each = _COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
    return [number for number in numbers if number * each <= free] or [min(numbers)]


def _counted(spec: Spec, profiles: Sequence[Profile], gradients: Mapping[str, Tensor], asked: Asked) -> list[Counted]:
    """Return a hook's payloads as one of each number of ranks that was not timed; none if they do not depend on it."""
    label = label_in_profile(spec.label)
    series = Series(tuple(profiles))
    payloads = [series.sends(label, profile.ranks) for profile in profiles]
    if len(payloads) > 1 and is_constant(payloads):
        return []
    compressor, policy = make_hook(spec, asked.seed), policy_of(spec)
    found = []
    for ranks in sorted(set(asked.ranks) - {profile.ranks for profile in profiles} - {1}):
        if _largest_answer(payloads[-1], ranks) <= _LARGEST_ANSWER:
            own = [
                {name: gradients[name].clone() for name in one.parameters} for one in profiles[0].hooks[label].buckets
            ]
            found.append(Counted(label, ranks, tuple(rounds_of(compressor, bucket, ranks, policy) for bucket in own)))
    return found


def _largest_answer(payloads: Payloads, ranks: int) -> float:
    """Return the bytes that this many ranks gather in a round, if payloads shrink no further."""
    gathered = [
        payload * ranks for rounds in payloads for sends in rounds for kind, payload in sends if kind == "all-gather"
    ]
    return max(gathered, default=0)
