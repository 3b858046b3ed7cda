"""One advice: which hook to use and what to type, from what is known of every hook's speed and loss.

`compare` asks with measured runs, `plan` with predictions, and the pages with tables; all say what `advise` says. The
safest gain comes first: a hook that costs no accuracy before one that gains more and costs some, which is named second
with its cost. A hook whose gain may be luck is never named, and if none is left, none pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commhooks.experiments.results.verdicts import USUAL, Judged, Range, Verdict
from commhooks.experiments.specs import Spec, is_diloco, steps_of_a_round
from commhooks.language.text import Spelling, parse
from commhooks.units import three_digits

BASELINE = "all-reduce"
_CERTAIN = 1.96  # standard deviations of a 95 % interval
_DILOCO_GAIN = 2.0  # DiLoCo is named if it is surely so many times as fast as all hooks of every step

FEEDBACK: Mapping[str, Mapping[str, bool]] = {
    "adam": {"sign": False, "int4": False, "top-k": True},
    "sgd": {"sign": True, "powersgd": True},
}
"""Whether a hook should use error feedback, by optimizer: what docs/reproductions/feedback-and-optimizers.md settles.

Missing hooks: the tasks there disagree, or differ by less than 0.01 nats.
"""


@dataclass(frozen=True)
class Cost:
    """What a hook cost on one task, beside all-reduce: positive is worse."""

    mean: float
    high: float
    """The worse end of the 95 % interval."""
    margin: float
    """A cost above it matters."""
    unit: str
    """The unit and the task, as in "nats on gpt"."""

    @property
    def task(self) -> str:
        """The task."""
        return self.unit.rpartition(" on ")[2]

    def __str__(self) -> str:
        """Return the mean with its unit: '0.024 nats on gpt'."""
        return f"{self.mean:.2g} {self.unit}" if math.isfinite(self.mean) else f"a diverged run ({self.unit})"


DILOCO_MARGIN = 1.7
"""The margin of DiLoCo's costs: 1 % of the fall from ln 256 to 2.025 nats, in percent of the latter."""
DILOCO_COSTS: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "all-reduce": {10: (7.5, 8.1), 30: (8.8, 9.1), 100: (10.1, 11.1)},
    "int4": {10: (7.5, 8.1), 30: (8.8, 9.3), 100: (10.2, 11.3)},
    "codebook": {10: (7.5, 8.3), 30: (9.3, 10.3), 100: (10.9, 11.9)},
    "powersgd": {10: (9.9, 11.1), 30: (13.7, 15.6), 100: (17.8, 19.7)},
    "sparse-loco": {10: (13.7, 15.0), 30: (16.6, 18.2), 100: (36.7, 40.8)},
}
"""DiLoCo's loss above that of data-parallel training, in percent, by compressor and the steps of a round: the mean and
the worse end, from docs/reproductions/diloco-recipes.md."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A hook that could be used, and what is known of it."""

    hook: str
    """Its name with settings and policy: 'powersgd:policy=fused,rank=4'."""
    speed_up: Range
    """The step under all-reduce over its own, with the 95 % interval."""
    costs: Sequence[Cost] = ()
    """What it cost on each task of the tables; empty: it is not in them."""
    judged: Judged | None = None
    """The verdict on real runs; None: its speed is predicted."""

    @classmethod
    def measured(cls, hook: str, judged: Judged, costs: Sequence[Cost] = ()) -> Option:
        """Return a hook that was judged by its runs."""
        return cls(hook=hook, speed_up=judged.speed_up, costs=costs, judged=judged)

    @property
    def is_safe(self) -> bool:
        """True if no cost that matters was found: in the tables, if it is in them, and in the runs, if there are some.

        Runs clear a hook that the tables lack only if they show that it is no worse.
        """
        is_known = bool(self.costs) and all(one.high <= one.margin for one in self.costs)
        if self.judged is None:
            return is_known
        loss, margin = self.judged.equal_steps, self.judged.margin
        return loss.low <= margin if is_known else not self.costs and loss.high <= margin

    def pays(self, saves: float) -> bool:
        """Return whether it pays: by its verdict or, if predicted, if its steps are surely faster by what matters."""
        if self.judged is not None:
            return self.judged.verdict is Verdict.PAYS
        return self.speed_up.low > 1 / (1 - saves)

    @property
    def is_diloco(self) -> bool:
        """True if it is DiLoCo."""
        return is_diloco(Spec.parse(self.hook))

    @property
    def worst(self) -> float:
        """Its largest mean cost, in margins: in the tables or, if they lack it, here. Infinite: not measured."""
        if not self.costs and self.judged is not None:
            return self.judged.equal_steps.mean / self.judged.margin
        return max((one.mean / one.margin for one in self.costs), default=math.inf)


@dataclass(frozen=True)
class Advice:
    """What to use, and why."""

    hook: str | None
    """The hook with its settings and policy; None: the plain all-reduce."""
    sentence: str
    faster: str | None = None
    """A hook that is faster still, and costs what the sentence says."""

    @property
    def rank(self) -> int | None:
        """The rank of PowerSGD; None: the hook has none."""
        found = dict(parse(self.hook).settings) if self.hook else {}
        return int(found.get("rank", 1)) if self.hook and parse(self.hook).name == "powersgd" else None

    @property
    def policy(self) -> str | None:
        """The policy, "fifo" or "fused"; None: nothing is attached."""
        if self.hook is None or is_diloco(Spec.parse(self.hook)):
            return None
        return str(dict(parse(self.hook).settings).get("policy", "fifo"))

    @property
    def line(self) -> str:
        """The line to type after `import commhooks`; empty: none."""
        return line_of(self.hook) if self.hook else ""


def advise(
    options: Iterable[Option],
    *,
    saves: float = USUAL.saves,
    unchecked: str = "",
    baseline: str = BASELINE,
    optimizer: str = "",
) -> Advice:
    """Return which hook to use, with the reason.

    Args:
        options: The hooks, without the baseline.
        saves: A saving matters above this fraction of a step's time.
        unchecked: Why no prediction holds here, such as "at 25 Gbit/s predictions were never checked"; then no
            predicted hook is named.
        baseline: What the hooks are compared with.
        optimizer: Its name, "adamw" or "sgd:lr=0.1": whether error feedback suits it is said of the hooks named.

    """
    known = [one for one in options if not (one.is_diloco and steps_of_a_round(Spec.parse(one.hook)) == 1)]
    if unchecked:
        known = [one for one in known if one.judged is not None]
        if not known:
            return Advice(None, f"Not checked: {unchecked}. Measure it with commhooks compare.")
    paying = [one for one in known if one.pays(saves)]
    safe = [one for one in paying if one.is_safe and not one.is_diloco]
    lossy = [one for one in paying if one not in safe]
    if not paying:
        return Advice(None, _none_pays(known, baseline, saves))
    sure = [one for one in lossy if one.judged is not None]
    if not safe and not sure:
        nearest = min(lossy, key=_by_cost)
        risky = f"No gain is known to be safe: compare the loss before you use {_said(nearest)}."
        return Advice(None, risky, nearest.hook)
    first, *rest = sorted(safe or sure, key=_by_cost)
    for one in rest if safe else []:  # one that costs a little more, but nothing that matters, must surely be faster
        first = one if _is_faster(one, first, 1 / (1 - saves)) else first
    said = [f"Use {_said(first)}"]
    others = [one for one in lossy if _is_faster(one, first, 1 / (1 - saves)) and one.worst < math.inf]
    steps, rounds = ([one for one in others if one.is_diloco is kind] for kind in (False, True))
    further = [min(steps, key=_by_cost)] if steps else []
    rounds = [one for one in rounds if all(_is_faster(one, other, _DILOCO_GAIN) for other in (first, *steps))]
    further += [min(rounds, key=_by_cost)] if rounds else []
    said += [f"faster still is {_said(one)}" for one in further]
    sentence = f"{'; '.join(said)}."
    for one in (first, *further):
        if (other := with_usual_feedback(one.hook, optimizer)) != one.hook:
            sentence += f" Under {optimizer} {other} lost less than {one.hook}: compare both."
    return Advice(first.hook, sentence, further[0].hook if further else None)


def line_of(hook: str) -> str:
    """Return the line of Python that trains with a hook."""
    spec = Spec.parse(hook)
    if is_diloco(spec):
        settings = sorted(spec.settings, key=lambda pair: pair[0] != "every")
        given = [f'{key}="{one}"' if isinstance(one, str | Spelling) else f"{key}={one}" for key, one in settings]
        return f"diloco = commhooks.DiLoCo({', '.join(['model', 'optimizer', *given])})"
    policy = dict(spec.settings).get("policy", "fifo")
    return f'commhooks.attach(model, "{spec.having(policy=None)}"' + (
        f', policy="{policy}")' if policy != "fifo" else ")"
    )


def predicted(speed_up: float, deviation: float) -> Range:
    """Return a predicted speed-up with its interval, from its relative standard deviation."""
    times = math.exp(_CERTAIN * deviation)
    return Range(speed_up, speed_up / times, speed_up * times)


def cost_of_diloco(compressor: str, every: int) -> tuple[Cost, ...]:
    """Return what DiLoCo cost with a compressor, in the shortest measured rounds of at least so many steps."""
    measured = DILOCO_COSTS.get(parse(compressor).name, {})
    rounds = min((one for one in measured if one >= every), default=None)
    if rounds is None:
        return ()
    mean, high = measured[rounds]
    return (Cost(mean, high, DILOCO_MARGIN, f"% of the loss on gpt, in rounds of {rounds}"),)


def with_usual_feedback(hook: str, optimizer: str) -> str:
    """Return a hook with the error feedback that suits an optimizer, unless it says so itself or nothing is known."""
    spec, name = parse(hook), optimizer.partition(":")[0].lower()
    wanted = FEEDBACK.get("adam" if "adam" in name else name, {}).get(spec.name, True)
    # A hook made from text has feedback unless it is told otherwise.
    return hook if wanted or spec.has("error_feedback") else str(spec.having(error_feedback=False))


def _by_cost(one: Option) -> tuple[float, float]:
    # Policies cost the same. If one is hardly faster, the fused one goes first: it gains more the higher the latency.
    is_fused = dict(Spec.parse(one.hook).settings).get("policy") == "fused"
    return one.worst, -one.speed_up.mean * (1 + USUAL.saves * is_fused)


def _is_faster(one: Option, other: Option, times: float) -> bool:
    return one.speed_up.low > times * other.speed_up.mean


def _said(one: Option) -> str:
    """Return a hook's speed and cost in words, or the reason of its verdict with what it cost elsewhere."""
    if one.judged is not None:
        cost = "" if one.judged.equal_steps.mean > one.judged.margin else _listed(one.costs)
        return f"{one.hook}: {one.judged.why}" + (f" (elsewhere it cost {cost})" if cost else "")
    within = f"{three_digits(one.speed_up.low)} to {three_digits(one.speed_up.high)}"
    return f"{one.hook}: its steps are {three_digits(one.speed_up.mean)} times as fast ({within}), {_cost(one)}"


def _cost(one: Option) -> str:
    if not one.costs:
        return "and its cost in accuracy was not measured"
    if one.is_safe:
        return f"and its accuracy was no worse on {' and '.join(cost.task for cost in one.costs)}"
    return f"but it cost {_listed(one.costs)}"


def _listed(costs: Sequence[Cost]) -> str:
    return " and ".join(str(one) for one in costs if one.high > one.margin)


def _none_pays(known: Sequence[Option], baseline: str, saves: float) -> str:
    """Return why nothing is used: the runs do not settle it, or none pays."""
    verdicts = {one.hook: one.judged.verdict for one in known if one.judged is not None}
    compared = [one for one in known if verdicts.get(one.hook) is not Verdict.DIVERGED]
    compared.sort(key=lambda one: -one.speed_up.mean)
    nearest = next((one for one in compared if verdicts.get(one.hook) is Verdict.OPEN), None)
    if nearest is not None:
        return f"Whether a hook pays is not settled. The nearest is {_said(nearest)}."
    unsure = next((one for one in compared if one.judged is None and one.speed_up.high > 1 / (1 - saves)), None)
    if unsure is not None:
        return f"No gain is sure: measure it with commhooks compare. The nearest is {_said(unsure)}."
    said = f"None pays: stay with {baseline}."
    return f"{said} The nearest is {_said(compared[0])}." if compared else said
