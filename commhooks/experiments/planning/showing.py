"""The output of `commhooks plan`, `profile` and `probe`: tables, and conclusions in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from commhooks.communicators.collective import ring_bytes
from commhooks.experiments.links.link import format_rate
from commhooks.experiments.planning.candidates import ALL_REDUCE, DENSE, NOOP
from commhooks.experiments.planning.plans import Choice, Plan
from commhooks.experiments.planning.predicting import TABLES_SPREAD
from commhooks.experiments.planning.probes import MOST_DISAGREEMENT, Cost, Probe
from commhooks.experiments.planning.profiles import Profile, StepParts
from commhooks.experiments.planning.request import ASSUMED_LATENCY, Planned
from commhooks.experiments.report.table import plain_table
from commhooks.experiments.report.words import NEVER, percent, range_of_seconds, times
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec, is_diloco
from commhooks.experiments.timing.link import plain_kind
from commhooks.units import bytes_in_words, counted, seconds_in_words

_MEASURE = (
    "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commhooks plan --task "
    "my_task.py:task --validate"
)
CHECKED_RANKS = 8
"""The most ranks on which predictions were compared with real steps: docs/reproductions/simulation-clusters.md."""
_MEBI = 2**20
_IDLE = 0.5  # utilisation below which DiLoCo is pointed at


def plan_tables(found: Planned) -> list[Table]:
    """Return a table of all hooks, fastest first; for several numbers of ranks, one with a row for each of them."""
    if len(found.plans) > 1:
        return [_by_ranks(found)]
    (plan,) = found.plans
    title = f"{found.model}, {counted(plan.ranks, 'rank')}, {_network_in_words(found)}"
    title += ", sharded by FSDP2" if found.sharded else ""
    table = plain_table(title, ("step", "speed-up", "compute", "sent", "cost in accuracy"))
    for one in plan.choices:
        name = escape(one.label)
        table.add_row(
            f"[bold]{name}" if one.label == plan.advice.hook else name,
            f"{seconds_in_words(one.seconds)} ± {100 * one.uncertainty / one.seconds:.0f} %",
            times(one.speed_up),
            percent(one.utilisation),
            bytes_in_words(one.bytes_sent),
            _cost_in_words(one, plan),
        )
    table.caption = (
        "compute: the part of a step in which a rank computes. sent: by each rank. cost in accuracy: of these settings "
        "on small tasks; another model may lose more or less."
    )
    return [table]


def plan_sentences(found: Planned) -> list[str]:
    """Return the conclusions from plans, as sentences."""
    plan = found.plans[0]
    said = [*_advice_by_ranks(found.plans)] if len(found.plans) > 1 else [plan.advice.sentence]
    if plan.advice.hook is not None and len(found.plans) == 1:
        said.append(f"In Python: {plan.of(plan.advice.hook).code}")
    if plan.advice.sentence.startswith("Not checked"):
        said.append(f"Measure: {_MEASURE}")
    else:
        said.append(
            f"Without any communication steps would be {times(plan.bound)} as fast as with {plan.compared} on "
            f"{counted(plan.ranks, 'rank')}: no hook can save more."
        )
    diloco = [one for one in plan.choices if is_diloco(Spec.parse(one.label))]
    if not (found.sharded or diloco) and max(one.utilisation for one in plan.choices) < _IDLE:
        said.append(
            "Even the fastest leaves ranks idle for most of a step. To communicate in fewer steps, add --hook "
            "diloco:every=30; it trains differently, so compare the loss."
        )
    if found.plans[-1].ranks > CHECKED_RANKS:
        said.append(
            f"Predictions were compared with real steps on up to {CHECKED_RANKS} ranks; those on more are extrapolated."
        )
    said += _on_the_network(found)
    if found.profile is None:
        said.append(
            f"Nothing was measured: steps are computed from tables, on {counted(found.cores, 'core')} a rank, and were "
            f"{percent(TABLES_SPREAD)} off where they were compared with real ones. --task my_task.py:task measures."
        )
    if plan.plain_error is not None:
        word = "slower" if plan.plain_error > 0 else "faster"
        said.append(
            f"The plain all-reduce is predicted {percent(abs(plan.plain_error))} {word} than it was measured; the "
            "uncertainties include that."
        )
    if found.sharded:
        said.append("Steps of FSDP2 are computed, not measured: commhooks compare --sharded measures them.")
    return said


def validation_table(found: Planned) -> Table:
    """Return a table of predicted and measured steps."""
    table = plain_table("real steps, in turns", ("predicted", "measured (quartiles)", "error"))
    for label, steps in found.measured.items():
        if label == NOOP:
            continue
        spread, shown = Spread.of(steps), DENSE if label == ALL_REDUCE else label
        predicted = found.plans[0].of(shown).seconds
        table.add_row(
            escape(shown),
            seconds_in_words(predicted),
            f"{seconds_in_words(spread.median)} ({range_of_seconds(spread.median, spread.low, spread.high)})",
            f"{100 * (predicted / statistics.median(steps) - 1):+.1f} %",
        )
    return table


def probe_table(found: Probe) -> Table:
    """Return a table of the collectives between the ranks."""
    title = f"{counted(found.ranks, 'rank')}, link {found.link or 'real'}, {found.backend}, {found.took:.1f} s"
    if found.disagreement > MOST_DISAGREEMENT:
        title += f"; unsteady: halves disagree by up to {percent(found.disagreement)}"
    columns = ("latency", "rate", "largest sent", "took", "processor", "residual", "used")
    table = plain_table(title, columns, first="collective")
    for kind, cost in found.costs.items():
        table.add_row(escape(kind), *_collective(kind, cost, found.ranks))
    return table


def profile_table(found: Profile) -> Table:
    """Return a table of all settings: the step, and its parts."""
    title = (
        f"{found.model}, {counted(found.ranks, 'rank')}, {found.ddp} DDP; nothing is sent but in the first row; "
        f"milliseconds, median (quartiles) of {found.noop.steps} steps"
    )
    table = plain_table(title, ("step", "forward", "backward", "exposed", "optimizer", "state"), first="hook")
    table.add_row("plain all-reduce", *_parts(found.plain), "")
    for label, hook in found.hooks.items():
        table.add_row(escape(label), *_parts(hook.step), bytes_in_words(hook.state_bytes) if hook.state_bytes else "")
    return table


def profile_sentences(found: Profile) -> Sequence[str]:
    """Return the conclusions from a profile, as sentences."""
    first, last = (f"{1e3 * one.ready:.1f} ms ({one.name})" for one in (found.gradients[0], found.gradients[-1]))
    buckets = found.hooks[NOOP].buckets
    handed_in = ", ".join(f"{1e3 * bucket.ready:.1f}" for bucket in buckets)
    return (
        f"Noop bound: {found.verdict()}.",
        f"Gradients are ready from {first} to {last}, {counted(len(buckets), 'bucket')} at {handed_in} ms.",
        f"The profiler itself took {percent(found.own_share)} of a step.",
    )


def _by_ranks(found: Planned) -> Table:
    """Return a table with a row for each hook and a column for each number of ranks."""
    title = f"{found.model}, {_network_in_words(found)}: steps by number of ranks"
    table = plain_table(title, tuple(f"{plan.ranks:,}" for plan in found.plans))
    for label in (one.label for one in found.plans[-1].choices):
        table.add_row(escape(label), *(seconds_in_words(plan.of(label).seconds) for plan in found.plans))
    return table


def _advice_by_ranks(plans: Sequence[Plan]) -> list[str]:
    """Return the advice of each plan that recommends something else than the plan before."""
    said: list[str] = []
    before: str | None = ""
    for one in plans:
        if one.advice.hook != before:
            said.append(f"From {counted(one.ranks, 'rank')} on: {one.advice.sentence}")
        before = one.advice.hook
    return said


def _network_in_words(found: Planned) -> str:
    if found.link is None:
        return f"link {found.probe.link or 'real' if found.probe else ''}, probed"
    return f"{format_rate(found.link.rate)}"


def _on_the_network(found: Planned) -> list[str]:
    """Return sentences about what is not known of the network."""
    if found.latency_is_assumed and found.link is not None:
        rate = format_rate(found.link.rate).replace(" ", "")
        return [
            f"The latency is assumed: {seconds_in_words(ASSUMED_LATENCY)}, as between neighbours. Measure it with "
            f"ping HOST, and give half of the time that it reports: --link {rate},latency=5ms"
        ]
    if found.probe is None:
        return []
    said = []
    hosts = set(found.probe.hosts)
    if len(hosts) == 1 and found.probe.link in ("", "real", "unlimited"):
        said.append(
            "All ranks are on one host: this is the loopback of one machine, not your link. Name yours, --link "
            "200Mbit/s,latency=5ms, or start a rank on each machine with torchrun."
        )
    if found.probe.disagreement > MOST_DISAGREEMENT:
        said.append(
            f"The network was unsteady: two halves of the probe disagree by up to {percent(found.probe.disagreement)}, "
            "and the uncertainties include that."
        )
    return said


def _cost_in_words(one: Choice, plan: Plan) -> str:
    """Return a hook's worst cost in accuracy: '0.98 nats on gpt', 'no worse' or 'not measured'."""
    if one.label == plan.compared:
        return NEVER
    if not one.costs:
        return "not measured"
    return "no worse" if one.option.is_safe else str(max(one.costs, key=lambda cost: cost.mean / cost.margin))


def _collective(kind: str, cost: Cost, ranks: int) -> list[str]:
    line, processor = cost.line, cost.processor_line
    bits = 8 * ring_bytes(plain_kind(kind), _MEBI, ranks) / _MEBI  # sent for each byte of payload
    return [
        f"{1e6 * line.at_zero:,.0f} µs",
        format_rate(float(f"{bits / line.per_byte:.3g}") if line.per_byte else None),
        f"{cost.largest / 1024:,.3g} KiB" if cost.largest < _MEBI else f"{cost.largest / _MEBI:.3g} MiB",
        f"{1e3 * cost.timings[-1].seconds.median:.3g} ms",
        f"{1e6 * processor.at_zero:,.0f} µs + {1e9 * processor.per_byte:.2g} ns/B",
        percent(cost.residual),
        "line" if cost.is_line else "sizes",
    ]


def _parts(step: StepParts) -> list[str]:
    whole = step.seconds
    return [
        f"{1e3 * whole.median:.2f} ({1e3 * whole.low:.2f}–{1e3 * whole.high:.2f})",
        *(f"{1e3 * part:.2f}" for part in (step.forward, step.backward, step.exposed, step.optimizer)),
    ]
