"""The section of `commhooks plan` about seldom communication."""

from __future__ import annotations

import shlex

from rich.markup import escape
from rich.table import Table

from ..predicting import Plan, Profile
from ..predicting.candidates import DENSE
from ..predicting.every import MOST_STEPS, SeldomChoice
from ..report.table import plain_table
from ..report.words import percent
from ..specs import DILOCO, Spec
from ..tasks import TASKS

_OWN_TASK = "my_task.py:task"
_COMPARED = 3  # compressors in the command that compares the loss, which differs between them


def is_asked(plan: Plan) -> bool:
    """Return whether seldom communication should be shown: no hook of every step reaches the utilisation."""
    return max(choice.utilisation for choice in plan.choices) < plan.wanted_utilisation


def seldom_table(plan: Plan) -> Table:
    """Return a table of each compressor's shortest rounds that reach the utilisation, at once and in fragments."""
    table = plain_table(
        f"DiLoCo: rounds for {percent(plan.wanted_utilisation)} compute", ("steps of a round", "compute", "kB a step")
    )
    for one in plan.seldom:
        streamed = f", {one.rounds.fragments} fragments, delay {one.rounds.delay}" if one.rounds.delay else ""
        table.add_row(
            escape(one.compressor + streamed),
            str(one.rounds.every) if one.is_enough else f"over {MOST_STEPS}",
            percent(one.utilisation),
            f"{one.bytes_per_step / 1e3:,.1f}",
        )
    table.caption = f"compute, kB a step: with these rounds; with {MOST_STEPS} steps if more are needed."
    return table


def seldom_sentences(plan: Plan, profile: Profile) -> list[str]:
    """Return the conclusions from the table, or the reason why there is none, as sentences."""
    wanted = f"{percent(plan.wanted_utilisation)} compute"
    if not is_asked(plan):
        return [f"Seldom communication (DiLoCo) is not needed: a hook of every step reaches {wanted}."]
    best = plan.seldom[0]
    if not best.is_enough:
        return [
            f"Seldom communication (DiLoCo) would not reach {wanted} in rounds of up to {MOST_STEPS} steps with any of "
            "these compressors: profile others (--hook int4)."
        ]
    return [
        f"No hook of every step reaches {wanted}. DiLoCo is predicted to in rounds of {best.rounds.every} steps: "
        f"{best.code}",
        "It trains differently: ranks' models go apart within a round, so an equal number of steps may end at another "
        f"loss, and nothing here predicts it. Compare the loss: {compare_command(plan, profile)}",
    ]


def compare_command(plan: Plan, profile: Profile) -> str:
    """Return the command that trains with the all-reduce and DiLoCo, on the profile's task and link.

    DiLoCo is compared with the compressors of the shortest rounds, at most `_COMPARED`, each with its shortest rounds.
    """
    shortest: dict[str, SeldomChoice] = {}
    for one in plan.seldom:
        if one.is_enough:
            shortest.setdefault(one.compressor, one)
    compared = list(shortest.values())[:_COMPARED]
    is_task = ":" in profile.model or profile.model in TASKS  # otherwise a class, which was profiled in Python
    words = ["commhooks", "compare", "--task", profile.model if is_task else _OWN_TASK]
    if profile.link == "real" or not profile.link:
        words = ["torchrun", "...", "--no-python", *words, "--link", "real"]
    else:
        words += ["--link", profile.link, "--ranks", str(profile.ranks)]
    return shlex.join([*words, *(word for hook in (DENSE, *map(_hook, compared)) for word in ("--hook", hook))])


def _hook(choice: SeldomChoice) -> str:
    """Return the choice as a hook, in the form of comparisons."""
    compressor, rounds = Spec.parse(choice.compressor), choice.rounds
    given = {"every": rounds.every, "compressor": compressor if compressor.settings else compressor.name}
    if rounds.fragments > 1:
        given |= {"fragments": rounds.fragments, "delay": rounds.delay}
    return Spec(DILOCO, tuple(given.items())).label
