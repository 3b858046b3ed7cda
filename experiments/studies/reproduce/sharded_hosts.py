"""Steps of a sharded GPT between hosts: plain FSDP2 beside compressed reductions and gathers, in turns.

Every rank is on a host of its own (a network namespace), and all hosts share this machine's processors. Turns without a
limit of the links come first: what they take, and what the step-time model adds for a link, is the prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

from commhooks.experiments.hooks import gather_of, make_hook
from commhooks.experiments.links.gloo import ACKNOWLEDGEMENT, FRAMING
from commhooks.experiments.links.link import parse_rate
from commhooks.experiments.report.words import percent
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.timing.link import OF_PYTORCH, Link, NoLink
from commhooks.experiments.timing.sharded import PLAIN, modules_of, sharded_step
from commhooks.experiments.timing.step_time import Step, step_time
from commhooks.units import counted, three_digits
from experiments.studies.bench.memory import KEEPS_FREED, is_countable
from experiments.studies.blocks import Block, Table
from experiments.studies.medians import milliseconds, with_quartiles
from experiments.studies.ranks import UNLIMITED_HOSTS, on_ranks
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.results import Reproduction
from experiments.studies.reproduce.sharded_hosts_ranks import Settings, run_turns, weigh

_HEADERS = FRAMING + ACKNOWLEDGEMENT  # bytes on the wire for each byte of data, in both directions at once
_FREE = "unlimited"


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the turns of all hooks, by number of ranks and rate; and the memory that they take."""
    measured: dict[str, Any] = {"turns": {}, "memory": {}}
    for ranks in settings.ranks:
        measured["turns"][str(ranks)] = notes.once(f"{ranks} ranks", partial(_world, settings, ranks, notes))
    if is_countable():
        measured["memory"] = notes.once("memory", lambda: _weighed(settings, notes))
    return measured


def _world(settings: Settings, ranks: int, notes: Notes) -> dict[str, Any]:
    """Return what new ranks measured, by rate and hook."""
    rates = {rate: None if rate == _FREE else parse_rate(rate) for rate in (_FREE, *settings.rates)}
    tell = lambda text: notes.tell(f"{ranks} ranks: {text}")
    link = UNLIMITED_HOSTS if settings.kind == "hosts" else None
    return on_ranks(partial(run_turns, settings, rates), ranks, tell, link=link)


def _weighed(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the bytes that each hook states, and that the ranks' memory grew by at most; two ranks, without hosts."""
    return on_ranks(partial(weigh, settings), 2, notes.tell, variables=KEEPS_FREED)


def step_of(task: str, hook: str, ranks: int) -> Step:
    """Return the exchanges of a step under a hook, in which nothing else takes time."""
    spec = Spec.parse(hook)
    compressor = None if hook == PLAIN else make_hook(spec)
    return sharded_step(modules_of(load_task(task).model), compressor, ranks, compute=0.0, gather=gather_of(spec))


def gloo_bytes(step: Step, ranks: int) -> int:
    """Return the bytes of data that Gloo sends in a step: for PyTorch's reduce-scatter, twice the bytes of a ring."""
    again = 0
    for bucket in step.buckets:
        for kind, payload in bucket.stages[-1].collectives:
            again += NoLink().transfer(kind, payload, ranks).bytes_sent * (kind == f"reduce-scatter{OF_PYTORCH}")
    return step_time(step, NoLink(), ranks).bytes_sent + again


def _steps(settings: Settings, by_rate: Mapping[str, Any], ranks: int, rate: str) -> tuple[Table, dict[str, float]]:
    """Return a row for each hook at one rate, and the parts by which predictions are too long."""
    bits = parse_rate(rate)
    assert bits is not None, "the settings have rates"
    free = {hook: statistics.median(by_rate[_FREE][hook]["seconds"]) for hook in settings.hooks}
    predicted = {
        hook: seconds + step_time(step_of(settings.task, hook, ranks), Link(rate=bits), ranks).communication
        for hook, seconds in free.items()
    }
    plain, rows, off = by_rate[rate][PLAIN]["seconds"], [], {}
    for hook in settings.hooks:
        own = by_rate[rate][hook]["seconds"]
        times_as_fast = Spread.of([theirs / ours for theirs, ours in zip(plain, own, strict=True)])
        rows.append(
            [
                f"`{hook}`",
                three_digits(1e3 * free[hook]),
                milliseconds(own),
                three_digits(1e3 * predicted[hook]),
                with_quartiles(times_as_fast, "{:.2f}".format),
                f"{predicted[PLAIN] / predicted[hook]:.2f}",
            ]
        )
        off[f"`{hook}`, {ranks} ranks, {rate}"] = predicted[hook] / statistics.median(own) - 1
    columns = ["hook", "no limit, ms", "step, ms", "predicted, ms", "times as fast", "predicted"]
    return Table(f"{settings.task}, {ranks} ranks, {rate}", columns, rows), off


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return steps at each rate, bytes, memory, and what follows."""
    blocks: list[Block] = []
    off: dict[str, float] = {}
    for ranks, by_rate in measured["turns"].items():
        for rate in settings.rates:
            table, own = _steps(settings, by_rate, int(ranks), rate)
            blocks.append(table)
            off |= own
    where, farthest = max(off.items(), key=lambda one: abs(one[1]))
    within = statistics.median(map(abs, off.values()))
    return [
        *blocks,
        f"Medians of {counted(settings.turns, 'turn')} with quartiles; times as fast: as plain FSDP2, turn by turn. "
        f"The prediction is off by {percent(within)} in the median, and by {percent(abs(farthest))} at most "
        f"({where}: {'too long' if farthest > 0 else 'too short'}).",
        *_bytes(settings, measured["turns"]),
        *_memory(settings, measured["memory"]),
    ]


def _bytes(settings: Settings, turns: Mapping[str, Any]) -> list[Block]:
    """Return what ranks send in a step: by formula, as counted, and by the interfaces of the hosts."""
    cells, off, agree = [], [], True
    for ranks, by_rate in turns.items():
        for hook in settings.hooks:
            own, step = by_rate[settings.rates[0]][hook], step_of(settings.task, hook, int(ranks))
            formula, moved = step_time(step, NoLink(), int(ranks)).bytes_sent, statistics.median(own["moved"])
            agree = agree and formula == moved
            carried, sent = statistics.median(own["carried"]), gloo_bytes(step, int(ranks))
            if carried:
                off.append((carried / sent / _HEADERS - 1, f"`{hook}`, {ranks} ranks"))
            interface = [three_digits(carried / 1e3), f"{carried / sent:.3f}"] if carried else ["", ""]
            cells.append([ranks, f"`{hook}`", *(three_digits(one / 1e3) for one in (formula, moved, sent)), *interface])
    columns = ["ranks", "hook", "formula, kB", "counted, kB", "Gloo, kB", "interface, kB", "over Gloo's"]
    said = "Formula and counters agree to the byte." if agree else "Formula and counters differ."
    if off:
        farthest = max(off, key=lambda one: abs(one[0]))
        said += (
            f" The interfaces count what Gloo sends, with headers and acknowledgements ({_HEADERS:.3f} times), and are "
            f"off by {percent(abs(farthest[0]))} at most ({farthest[1]})."
        )
    return [Table("What a rank sends in a step", columns, cells), said]


def _memory(settings: Settings, memory: Mapping[str, Any]) -> list[Block]:
    """Return what hooks state to use, and what the process grew by beyond plain FSDP2."""
    if not memory:
        return []
    plain = memory[PLAIN]["grown"]
    cells = [
        [f"`{hook}`", *(three_digits(one[name] / 1e6) for name in ("stated", "residuals", "grown")),
         three_digits(max(0.0, one["grown"] - plain) / 1e6)]
        for hook, one in memory.items()
    ]  # fmt: skip
    columns = ["hook", "stated, MB", "of it residuals", "grown, MB", "more than plain, MB"]
    elements = sum(module.elements for module in modules_of(load_task(settings.heavy).model))
    return [
        Table(f"Memory of a rank: {settings.heavy}, {elements:,} parameters, 2 ranks", columns, cells),
        "Stated: `memory_report()`, the largest module's input and output of FSDP2 included. Grown: by how much model, "
        "optimizer and 4 steps raise the process's memory at most, on the rank where it is more.",
    ]


REPRODUCTION = Reproduction(
    name="sharded-hosts",
    title="Steps of a sharded model between hosts",
    source="This project: `commhooks.attach_sharded`",
    said=(
        "Of a step's three exchanges (two gathers and a reduction), compressed reductions make one smaller, and "
        "compressed gathers the others.",
        "Over Gloo, an uncompressed reduction already sends half of what PyTorch's reduce-scatter does.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(
            kind="emulated", ranks=(2,), rates=("100Mbit/s",), task="gpt:size=tiny", heavy="gpt:size=tiny",
            hooks=(PLAIN, "int8", "int8:gather=int8"), turns=2,
        ),
    },
    measure=measure,
    show=show,
)  # fmt: skip
