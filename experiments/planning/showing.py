"""The output of `commhooks plan`, `profile` and `probe`: tables, and conclusions in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from commhooks.communicators.collective import ring_bytes
from commhooks.units import bytes_in_words, counted, seconds_in_words

from ..links.link import format_rate
from ..report.table import plain_table
from ..report.words import percent, range_of_seconds, times
from ..results.summary import Spread
from ..timing.link import plain_kind
from .candidates import ALL_REDUCE, DENSE, NOOP
from .plans import Plan
from .predicting import TABLES_SPREAD
from .probes import MOST_DISAGREEMENT, Cost, Probe
from .profiles import Profile, StepParts
from .recommending import Choice
from .request import Planned

CHECKED_RATES = 10e6, 3e9
"""Bits per second between which predictions were compared with real steps: docs/guide/plan/checked.md."""
_MEBI = 2**20
_IDLE = 0.5  # utilisation below which DiLoCo is pointed at


def plan_tables(found: Planned) -> list[Table]:
    """Return a table of all hooks, fastest first; for several numbers of ranks, one with a row for each of them."""
    if len(found.plans) > 1:
        return [_by_ranks(found)]
    (plan,) = found.plans
    title = f"{found.model}, {counted(plan.ranks, 'rank')}, {_network_in_words(found)}"
    title += ", sharded by FSDP2" if found.sharded else ""
    table = plain_table(
        title, ("step", "speed-up", "compute", "sent", *(f"{task}, {unit}" for task, unit in plan.tasks))
    )
    for one in plan.choices:
        name = escape(one.label)
        table.add_row(
            f"[bold]{name}" if one.label == plan.recommended else name,
            f"{seconds_in_words(one.seconds)} ± {100 * one.uncertainty / one.seconds:.0f} %",
            times(one.speed_up),
            percent(one.utilisation),
            bytes_in_words(one.bytes_sent),
            *(_loss_in_words(one, task) for task, _ in plan.tasks),
        )
    columns = " and ".join(task for task, _ in plan.tasks)
    table.caption = (
        f"compute: the part of a step in which a rank computes. sent: by each rank. {columns}: differences from "
        "all-reduce on small tasks, of the leaderboard; another model may lose more or less."
    )
    return [table]


def plan_sentences(found: Planned) -> list[str]:
    """Return the conclusions from plans, as sentences."""
    plan = found.plans[0]
    said = []
    if unchecked := _unchecked(found):
        said.append(unchecked)
    else:
        said += plan.reasons if len(found.plans) == 1 else _reasons_by_ranks(found.plans)
        said.append(
            f"Without any communication steps would be {times(plan.bound)} as fast as with {plan.compared} on "
            f"{counted(plan.ranks, 'rank')}: no hook can save more."
        )
    if max(one.utilisation for one in plan.choices) < _IDLE and not any(one.every > 1 for one in plan.choices):
        said.append(
            "Even the fastest leaves ranks idle for most of a step. To communicate in fewer steps, add --hook "
            "diloco:every=30; it trains differently, so compare the loss."
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


def _reasons_by_ranks(plans: Sequence[Plan]) -> list[str]:
    """Return the first reason of each plan that recommends something else than the plan before."""
    changes = [one for before, one in zip([None, *plans], plans, strict=False) if _hook_of(before) != _hook_of(one)]
    return [f"From {counted(one.ranks, 'rank')} on: {one.reasons[0]}" for one in changes]


def _hook_of(plan: Plan | None) -> str | None:
    return "" if plan is None else plan.recommended


def _network_in_words(found: Planned) -> str:
    if found.link is None:
        return f"link {found.probe.link or 'real' if found.probe else ''}, probed"
    return f"{format_rate(found.link.rate)}"


def _unchecked(found: Planned) -> str | None:
    """Return a sentence if the model was never compared with real steps at the given rate."""
    low, high = CHECKED_RATES
    if found.link is None or low <= found.link.rate <= high:
        return None
    return (
        f"Not checked: predictions were compared with real steps from {format_rate(low)} to {format_rate(high)}, and "
        f"{format_rate(found.link.rate)} is beyond, so nothing is recommended. Measure: torchrun --nnodes 2 "
        "--nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commhooks plan --task my_task.py:task --validate"
    )


def _on_the_network(found: Planned) -> list[str]:
    """Return sentences about what is not known of the network."""
    if found.latency_is_assumed and found.link is not None:
        rate = format_rate(found.link.rate).replace(" ", "")
        return [
            f"The latency is assumed: {_assumed()}, as between neighbours. Measure it with ping HOST, and give half of "
            f"the time that it reports: --link {rate},latency=5ms"
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


def _assumed() -> str:
    from .request import ASSUMED_LATENCY

    return seconds_in_words(ASSUMED_LATENCY)


def _loss_in_words(one: Choice, task: str) -> str:
    """Return a compressor's difference from all-reduce on a task: '+0.98', 'diverged' or 'not measured'."""
    loss = next((loss for loss in one.losses if loss.task == task), None)
    if loss is None:
        return "not measured"
    mean = loss.difference.mean
    return "diverged" if mean is None else f"{round(mean, 2) + 0.0:+.2f}"  # no -0.00


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
