"""A compressor for each parameter: the cheapest choice whose worst-case error stays within a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor, loss_of_a_matrix
from commhooks.planning.candidates import ALL_REDUCE, NOOP
from commhooks.planning.payloads import rounds_of
from commhooks.planning.predicting import compressor_of
from commhooks.planning.probe import Probe
from commhooks.planning.profile import GradientProfile, HookProfile, Profile
from commhooks.wrappers.per_parameter import PerParameter

Option = tuple[float, float]
"""A compressor's cost for a parameter, in seconds, and its error."""
_GRID = 10_000  # steps into which the budget is divided; errors are rounded up, so that it is never exceeded


def per_layer(profile: Profile, probe: Probe, budget: float) -> PerParameter | AllReduceMean:
    """Return a compressor for each parameter that minimises the time of the step's exchange within an error budget.

    A parameter's error is `Loss.error`, the fraction of its squared norm that may be lost in the worst case (before
    error feedback returns it); 0 if nothing is lost. The budget limits the mean over all elements. The time consists of
    compression, in proportion to bytes, and of transfers over the probed network.

    Args:
        profile: Its "fifo" hooks and the plain all-reduce can be chosen.
        probe: The probe of the network.
        budget: The largest mean error, in [0, 1); 0: nothing may be lost.

    Raises:
        SettingsError: The budget is out of range.

    """
    if not 0 <= budget < 1:
        raise SettingsError(f"per_layer(budget={budget!r}): the budget must be in [0, 1).")
    compressors: dict[str, Compressor] = {ALL_REDUCE: AllReduceMean()}
    for label, hook in profile.hooks.items():
        if label not in (NOOP, ALL_REDUCE) and hook.policy == "fifo":
            compressors[label] = compressor_of(hook)
    compressors = {label: one for label, one in compressors.items() if not loss_of_a_matrix(one).of_bucket}
    options = [_options(gradient, profile, probe, compressors) for gradient in profile.gradients]
    labels = list(compressors)
    chosen = [labels[place] for place in choose(options, budget)]
    rules = tuple(
        (gradient.name, compressors[label])
        for gradient, label in zip(profile.gradients, chosen, strict=True)
        if label != ALL_REDUCE
    )
    return PerParameter(rules=rules) if rules else AllReduceMean()


def _options(
    gradient: GradientProfile, profile: Profile, probe: Probe, compressors: Mapping[str, Compressor]
) -> list[Option]:
    """Return what each compressor costs for a parameter."""
    parameter = torch.zeros(gradient.shape, dtype=torch.float32, device="cpu")
    elements = sum(math.prod(one.shape) for one in profile.gradients)
    share = gradient.bytes / sum(one.bytes for one in profile.gradients)
    found = []
    for label, compressor in compressors.items():
        sends = rounds_of(compressor, {gradient.name: parameter.clone()}, profile.ranks)
        sent = sum(probe.costs[kind].line.per_byte * payload for one in sends for kind, payload in one)
        loss = compressor.loss(gradient.name, parameter)
        lost = loss.error if loss is not None and loss.is_kept else 0.0
        found.append((sent + share * _compression(profile.hooks[label]), lost * parameter.numel() / elements))
    return found


def choose(options: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """Return an option's index in each row, such that the errors add up to at most the budget and seconds are least.

    Every row needs an option without error. Errors are rounded up to multiples of 1/10,000 of the budget.
    """
    best: Mapping[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by errors used: seconds, and the choices
    for row in options:
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (seconds, chosen) in best.items():
            for place, (more, error) in enumerate(row):
                then = used + _steps(error, budget)
                if then <= _GRID and (then not in found or seconds + more < found[then][0]):
                    found[then] = (seconds + more, (*chosen, place))
        best = _undominated(found)
    return list(min(best.values())[1])


def _steps(error: float, budget: float) -> int:
    """Return how many steps of the grid an error takes."""
    if error == 0:
        return 0
    steps = error / budget * _GRID if budget else math.inf
    return math.ceil(steps - 1e-9) if steps <= _GRID else _GRID + 1


def _undominated(
    found: Mapping[int, tuple[float, tuple[int, ...]]],
) -> Mapping[int, tuple[float, tuple[int, ...]]]:
    """Leave out choices that take longer than one with less error."""
    kept: dict[int, tuple[float, tuple[int, ...]]] = {}
    least = math.inf
    for used in sorted(found):
        if found[used][0] < least:
            kept[used], least = found[used], found[used][0]
    return kept


def _compression(hook: HookProfile) -> float:
    return sum(bucket.after + sum(one.seconds for one in bucket.rounds) for bucket in hook.buckets)
