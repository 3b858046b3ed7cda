"""`commhooks plan`: profile the task, probe the link, predict every hook, and recommend one; then perhaps check it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from commhooks.errors import CommHooksError
from commhooks.units import three_digits

from .. import predicting
from ..launch import Send, WorldError
from ..links.link import LinkSettings, format_rate
from ..predicting import Profile, stored
from ..predicting.candidates import NOOP, default_candidates, with_the_two
from ..predicting.plans import Choice, Plan
from ..predicting.probes import MOST_DISAGREEMENT, Probe
from ..report.table import plain_table
from ..report.words import percent, range_of_seconds, seconds_in_words
from ..results.summary import Spread
from ..tasks.importing import import_named
from .probing import Asked as ProbeAsked
from .probing import probe_link
from .profiling import Asked as ProfileAsked
from .profiling import candidates_of, check_asked, profile_step, stepper
from .stepping import measure_steps
from .worlds import around, run_over

FORMAT = 1
_SILENCE = 60.0  # seconds without a word from any rank, beyond what measuring takes
_VALIDATED = 3  # hooks, besides the all-reduce


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a plan."""

    profile: ProfileAsked
    probe_seconds: float = 20.0
    unsteady: bool = False  # plan even if halves of the probe disagree
    validate_seconds: float | None = None  # None: predictions are not checked
    backend: str | None = None  # "none": sending uses no CPU time; None: the probed one
    sharded: bool = False  # predict steps of FSDP2 too
    probe: Probe | None = None  # of an earlier command; None: measure it
    profiled: Profile | None = None
    imports: tuple[str, ...] = ()  # modules of which the profile may name compressors

    @property
    def link(self) -> LinkSettings:
        """The network between the ranks."""
        return self.profile.link

    @property
    def seconds(self) -> float:
        """The seconds that measuring may take."""
        profile = self.profile.seconds if self.profiled is None else 0.0
        probe = self.probe_seconds if self.probe is None else 0.0
        return profile + probe + (self.validate_seconds or 0.0)


@dataclass(frozen=True)
class Planned:
    """A plan, the probe and the profile from which it was computed, and the seconds of real steps."""

    plan: Plan
    probe: Probe
    profile: Profile
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The seconds of real steps, by hook; empty: not measured."""

    def write(self, path: Path) -> None:
        """Write everything into a JSON file; an existing one is replaced at once, or stays as it is."""
        stored.write(self, path, form=FORMAT)


@dataclass(frozen=True)
class Refused:
    """The message that there is no plan."""

    why: str


def make_plan(asked: Asked, ranks: int) -> Planned | None:
    """Return the plan on the process that reports: this one, or torchrun's rank 0; None on torchrun's others.

    Raises:
        ValueError: There is no such task or hook, or the files do not belong together.
        WorldError: A rank failed or fell silent, or something could not be measured; the message says why.

    """
    if asked.probe is not None and asked.profiled is not None and asked.validate_seconds is None:
        plan = predicting.plan(asked.profiled, asked.probe, backend=asked.backend, sharded=asked.sharded)
        return Planned(plan, asked.probe, asked.profiled)
    check_asked(asked.profile)
    found: list[Planned] = []

    def hear(message: object) -> None:
        if isinstance(message, Refused):
            raise WorldError(f"error: {message.why}")
        assert isinstance(message, Planned), "rank 0 sends nothing else"
        found.append(message)

    longest = _SILENCE + asked.probe_seconds + asked.profile.seconds + 2 * (asked.validate_seconds or 0.0)
    run_over(asked.link, plan_on_rank, ranks, asked, hear, timeout=longest, device=asked.profile.device)
    return found[0] if found else None


def load(probe: Path | None, profile: Path | None) -> dict[str, Any]:
    """Return the contents of files, as fields of `Asked`.

    Raises:
        ValueError: A file is not a probe or a profile.

    """
    try:
        return {
            "probe": None if probe is None else Probe.read(probe),
            "profiled": None if profile is None else Profile.read(profile),
        }
    except CommHooksError as error:
        raise ValueError(str(error)) from error


def plan_on_rank(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    """Measure the parts that are not given, and plan; rank 0 sends the result, each rank that fails its reason."""
    import_named(asked.imports)
    try:
        with stepper(asked.profile) as step:
            profile = asked.profiled or profile_step(step, asked.profile)
            probe = asked.probe or probe_link(
                ProbeAsked(
                    asked.link,
                    asked.probe_seconds,
                    unsteady=asked.unsteady,
                    device=asked.profile.device,
                    profile=profile,
                )
            )
            plan = predicting.plan(profile, probe, model=step.ddp, backend=asked.backend, sharded=asked.sharded)
            measured: Mapping[str, Sequence[float]] = {}
            if asked.validate_seconds is not None:
                best = {choice.label for choice in hooks_to_validate(plan)}
                given = candidates_of(asked.profile)
                hooks = with_the_two(default_candidates() if given is None else given)
                own = [one for one in hooks if one.label in best]
                measured = measure_steps(step, own, asked.validate_seconds, around(asked.link))
    except CommHooksError as error:
        send(Refused(str(error)))
        return
    if rank == 0:
        send(Planned(plan, probe, profile, measured))


def hooks_to_validate(plan: Plan) -> list[Choice]:
    """Return the best three predictions, and the all-reduce."""
    best = list(plan.choices[:_VALIDATED])
    return best if plan.dense in best else [*best, plan.dense]


def plan_table(found: Planned) -> Table:
    """Return a table of all hooks, fastest first."""
    plan, profile = found.plan, found.profile
    title = f"{profile.model}, {profile.ranks} ranks, link {found.probe.link or 'real'}: predicted steps"
    headings = ("step, ms", "speed-up", "compute", "kB sent", "rate needed")
    table = plain_table(title, headings)
    rates = dict(plan.rates)
    for choice in plan.choices:
        rate = rates[choice.label]
        table.add_row(
            f"[bold]{escape(choice.label)}" if choice == plan.recommended else escape(choice.label),
            f"{1e3 * choice.seconds:.1f} ± {1e3 * choice.uncertainty:.1f}",
            f"{choice.speed_up:.2f}×",
            percent(choice.utilisation),
            f"{choice.bytes_sent / 1e3:,.0f}",
            "none" if rate is None else format_rate(float(f"{rate:.2g}")),
        )
    table.caption = (
        f"compute: what a step takes without communication ({seconds_in_words(profile.noop.seconds.median)}), over the "
        f"step. rate needed: for {percent(plan.wanted_utilisation)} compute, with this latency and processor; none: no "
        "rate is high enough."
    )
    return table


def sentences(found: Planned) -> list[str]:
    """Return the conclusions from a plan, as sentences."""
    plan = found.plan
    said = [plan.reason]
    if plan.pays:
        said.append(f"Use it: {plan.recommended.code}")
    said.append(
        f"Without any communication a step would be {plan.bound:.2f}× as fast as under the all-reduce: no hook can "
        "save more."
        if plan.bound >= 1
        else "Other load disturbed the steps: those without communication took longer than those with it. Plan again "
        "when the machine is idle, or with more --seconds."
    )
    best = min(plan.other_buckets, key=lambda choice: choice.seconds, default=plan.recommended)
    if best.seconds < plan.recommended.seconds - plan.recommended.uncertainty:
        said.append(
            f"With buckets of {best.bucket_cap_mb:g} MiB, {best.label} is predicted to take "
            f"{seconds_in_words(best.seconds)}."
        )
    said.append(
        "Backend: none. Sending is assumed to use no CPU time."
        if plan.backend == "none"
        else f"Backend: {plan.backend}. For each byte that it sends, the processor is busy for "
        f"{three_digits(1e9 * plan.seconds_per_byte)} ns, as probed."
    )
    said.append(
        f"The plain all-reduce is predicted {percent(abs(plan.plain_error))} "
        f"{'slower' if plan.plain_error > 0 else 'faster'} than it was measured; the uncertainties include that."
    )
    unnamed = [name for name, part in (("probe", found.probe), ("profile", found.profile)) if not part.link]
    if unnamed:
        said.append(
            f"The {' and the '.join(unnamed)} {'do' if len(unnamed) > 1 else 'does'} not name a link, so nothing says "
            "that both are of the same one."
        )
    if found.probe.disagreement > MOST_DISAGREEMENT:
        said.append(
            f"The network was unsteady: two halves of the probe disagree by up to {percent(found.probe.disagreement)}, "
            "and the uncertainties include that too."
        )
    return said


def validation_table(found: Planned) -> Table:
    """Return a table of predicted and measured steps."""
    table = plain_table("real steps, in turns", ("predicted, ms", "measured, ms (quartiles)", "error"))
    predicted = {choice.label: choice.seconds for choice in found.plan.choices if choice.label != NOOP}
    for label, steps in found.measured.items():
        spread = Spread.of(steps)
        error = predicted[label] / statistics.median(steps) - 1
        table.add_row(
            escape(label),
            f"{1e3 * predicted[label]:.1f}",
            f"{1e3 * spread.median:.1f} ({range_of_seconds(spread.median, spread.low, spread.high)})",
            f"{100 * error:+.1f} %",
        )
    return table
