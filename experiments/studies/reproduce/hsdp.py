"""HSDP on two sites that a slow link connects: FSDP2's own all-reduce of shards beside compressed ones, in turns.

A site is a host (a network namespace) whose ranks share its link, and this machine's processors with the other site.
What a step takes longer than one that sends nothing between sites is the slow hop; a formula predicts it by its bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.links.gloo import ACKNOWLEDGEMENT, FRAMING, moved_bytes
from commhooks.experiments.links.link import parse_rate
from commhooks.experiments.planning.costs import Shape
from commhooks.experiments.report.words import percent
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.timing.payloads import rounds_of
from commhooks.units import counted, three_digits
from experiments.studies.blocks import Block, Table
from experiments.studies.reproduce.hsdp_ranks import EVERY, HSDP, WITHIN, Asked, Settings, run_turns
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction
from experiments.studies.reproduce.worker import on_hosts

_SITES = 2
_HEADERS = FRAMING + ACKNOWLEDGEMENT  # bytes on the wire for each byte of data, in both directions at once
_SUM = "all-reduce"  # what HSDP sends in fp32

_NODES, _RANKS_PER_NODE = 2, 8
_RATES = ("1Gbit/s", "10Gbit/s")
_HOOKS = {
    "HSDP in fp32": "all-reduce",
    "HSDP in bf16, and `bf16`": "bf16",
    "`int8`": "int8",
    "`int4`": "int4",
    "`powersgd:rank=4`": "powersgd:rank=4",
    "`powersgd:rank=32`": "powersgd:rank=32",
}


def _decoder(layers: int, width: int, inner: int, words: int, *, keys: int, gated: bool) -> list[tuple[int, Shape]]:
    """Return how often a decoder-only transformer has parameters of each shape; biases are left out."""
    up: list[tuple[int, Shape]] = [((2 if gated else 1) * layers, (inner, width)), (layers, (width, inner))]
    attention: list[tuple[int, Shape]] = [(2 * layers, (width, width)), (2 * layers, (keys, width))]
    return [(2, (words, width)), *attention, *up, (2 * layers + 1, (width,))]


_MODELS = {
    "70M (Pythia)": _decoder(6, 512, 2048, 50304, keys=512, gated=False),
    "1.1B (TinyLlama)": _decoder(22, 2048, 5632, 32000, keys=256, gated=True),
    "6.7B (Llama 2)": _decoder(32, 4096, 11008, 32000, keys=4096, gated=True),
}


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the turns of all contenders, by batches in a step and rate; and the bytes between sites by formula."""
    turns = {
        str(batches): notes.once(_titled(batches), partial(_world, settings, batches, notes))
        for batches in settings.batches
    }
    own = [(1, tuple(one.shape)) for one in load_task(Spec.parse(settings.task, "task")).model.parameters()]
    formula = {hook: sent_by_site(own, hook, settings.ranks_per_site, _SITES) for hook in (_SUM, *settings.hooks)}
    return {
        "turns": turns,
        "formula": formula,
        "arithmetic": notes.once("arithmetic", partial(_computed, settings.models)),
    }


def _titled(batches: int | str) -> str:
    return f"batches a step: {batches}"


def _computed(models: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the bytes that a node of eight ranks sends, by model and hook."""
    return {
        model: {hook: sent_by_site(parameters, hook, _RANKS_PER_NODE, _NODES) for hook in _HOOKS.values()}
        for model, parameters in _MODELS.items()
        if model in models
    }


def _world(settings: Settings, batches: int, notes: Notes) -> dict[str, Any]:
    """Return what new ranks measured, by rate and contender."""
    asked = Asked(settings, batches, {rate: _bits(rate) for rate in settings.rates})
    tell = lambda text: notes.tell(f"{_titled(batches)}, {text}")
    found = on_hosts(run_turns, asked, _SITES, tell, has_hosts=settings.limited, ranks_per_host=settings.ranks_per_site)
    return dict(found)


def sent_by_site(parameters: Sequence[tuple[int, Shape]], hook: str, ranks: int, sites: int = 2) -> int:
    """Return the bytes of data that all ranks of a site together send to other sites in a step.

    Args:
        parameters: How often the model has a parameter of each shape; each rank keeps a part of the first dimension.
        hook: What averages the shards, which are in fp32: HSDP is "all-reduce", or "bf16" if it reduces in bf16.
        ranks: The number of ranks of a site, which share its link.
        sites: The number of sites.

    """
    total = 0
    for times, (length, *rest) in parameters:
        shard = {"": torch.ones(-(-length // ranks), *rest)}
        rounds = rounds_of(make_hook(Spec.parse(hook)), shard, sites, "fused")
        total += times * sum(moved_bytes(kind, payload, sites) for sends in rounds for kind, payload in sends)
    return ranks * total


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return the steps at each rate, what sites send, the losses, and the arithmetic for two nodes of eight."""
    blocks: list[Block] = []
    off: list[tuple[float, str]] = []
    for batches, by_rate in measured["turns"].items():
        for rate, turns in by_rate.items():
            title = f"{settings.task}, {rate}, {_titled(batches)}"
            rows = []
            for name in turns:
                averaged = int(batches) if name == EVERY else 1
                sent = averaged * measured["formula"].get(_SUM if name in {HSDP, EVERY} else name, 0)
                predicted = _seconds(sent, rate)
                rows.append(_row(turns, name, predicted))
                if predicted:
                    within, own = (statistics.median(turns[one]["seconds"]) for one in (WITHIN, name))
                    off.append(((within + predicted) / own - 1, f"{_label(name)}, {rate}, {_titled(batches)}"))
            columns = ["between sites", "step, ms", "slow hop, ms", "by formula, ms", "its share", "times as fast"]
            blocks.append(Table(title, columns, rows))
    farthest = max(off, key=lambda one: abs(one[0]))
    return [
        *blocks,
        f"Medians of {counted(settings.turns, 'turn')} with quartiles. The slow hop is what a step takes longer than "
        f'one "{WITHIN}" in the same turn; times as fast: as {HSDP}, turn by turn. The formula has the seconds of the '
        "bytes, with their headers, at the rate. These and a step without the slow hop are off from the step by "
        f"{percent(statistics.median(abs(part) for part, _ in off))} in the median, and by "
        f"{percent(abs(farthest[0]))} at most ({farthest[1]}: {'too long' if farthest[0] > 0 else 'too short'}).",
        *_bytes(settings, measured),
        *_losses(settings, measured["turns"]),
        *_arithmetic(measured["arithmetic"]),
    ]


def _row(turns: Mapping[str, Any], name: str, predicted: float) -> list[str]:
    own, within, plain = (turns[one]["seconds"] for one in (name, WITHIN, HSDP))
    hops = [seconds - least for least, seconds in zip(within, own, strict=True)]
    shares = [hop / seconds for hop, seconds in zip(hops, own, strict=True)]
    ratios = [theirs / seconds for theirs, seconds in zip(plain, own, strict=True)]
    of_hop = ["", "", ""]
    if predicted:
        share = _with_quartiles(shares, lambda value: f"{100 * value:.0f} %")
        of_hop = [_with_quartiles(hops, _milliseconds), _milliseconds(predicted), share]
    return [_label(name), _with_quartiles(own, _milliseconds), *of_hop, _with_quartiles(ratios, lambda v: f"{v:.2f}")]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def _label(name: str) -> str:
    return name if name in {WITHIN, HSDP, EVERY} else f"`{name}`"


def _with_quartiles(values: Sequence[float], form: Callable[[float], str]) -> str:
    spread = Spread.of(values)
    return f"{form(spread.median)} ({form(spread.low)} to {form(spread.high)})"


def _bytes(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return what a site sends in a step of one batch: by formula, as counted, and by its interface."""
    turns, cells = measured["turns"][str(settings.batches[0])][settings.rates[-1]], []
    for name in (HSDP, *settings.hooks):
        moved, carried = (statistics.median(turns[name][which]) for which in ("moved", "carried"))
        sent = measured["formula"][_SUM if name == HSDP else name]
        counted_bytes = "" if name == HSDP else three_digits(moved / 1e6)
        cells.append([_label(name), three_digits(sent / 1e6), counted_bytes, three_digits(carried / 1e6)])
    return [
        Table(
            "What a site sends in a step of one batch",
            ["between sites", "formula, MB", "counted, MB", "interface, MB"],
            cells,
        ),
        f"The formula is that of the arithmetic below. The interface's bytes include headers, {_HEADERS:.3f} times the "
        "data on a wire; virtual interfaces count those of up to 64 kB once.",
    ]


def _seconds(sent: float, rate: str) -> float:
    """Return the seconds for which these bytes of data, with their headers, keep a link of this rate busy."""
    return 8 * _HEADERS * sent / _bits(rate)


def _bits(rate: str) -> float:
    bits = parse_rate(rate)
    assert bits is not None, "the settings have rates"
    return bits


def _losses(settings: Settings, turns: Mapping[str, Any]) -> list[Block]:
    """Return the mean loss of the last turns, which all contenders take after the same number of steps."""
    cells = []
    for batches, by_rate in turns.items():
        last = {name: own["losses"] for name, own in by_rate[settings.rates[-1]].items() if name != WITHIN}
        plain = last[HSDP]
        for name, losses in last.items():
            apart = max(abs(one - other) for one, other in zip(losses, plain, strict=True))
            equal = "bit for bit" if apart == 0 else f"{statistics.fmean(losses) - statistics.fmean(plain):+.3f}"
            cells.append([batches, _label(name), f"{statistics.fmean(losses):.3f}", "" if name == HSDP else equal])
    steps = len(settings.rates) * (settings.turns + 1)
    return [
        Table("The loss", ["batches", "between sites", f"mean of the last {settings.turns}", "apart from HSDP"], cells),
        f"Every contender trains a model of its own on the same batches, {counted(steps, 'step')} in all.",
    ]


def _arithmetic(computed: Mapping[str, Mapping[str, int]]) -> list[Block]:
    """Return the time of the slow hop for two nodes of eight ranks, by the formula alone."""
    cells = []
    for model, by_hook in computed.items():
        elements = sum(times * math.prod(shape) for times, shape in _MODELS[model])
        for name, hook in _HOOKS.items():
            row = [model, f"{elements / 1e6:,.0f}", name, three_digits(by_hook[hook] / 1e6)]
            cells.append([*row, *(f"{_seconds(by_hook[hook], rate):.3g}" for rate in _RATES)])
    columns = ["model", "parameters, millions", "between nodes", "a node sends, MB", *(f"{rate}, s" for rate in _RATES)]
    return [
        Table(f"Arithmetic, not measured: the slow hop of {_NODES} nodes of {_RANKS_PER_NODE} ranks", columns, cells),
        f"Of S bytes of gradients, a rank keeps S/{_RANKS_PER_NODE}, and an all-reduce with its counterpart on the "
        f"other node sends 2·({_NODES} - 1)/{_NODES} of that; all {_RANKS_PER_NODE} ranks share one network card. The "
        "seconds are these bytes with their headers at the rate, without compute and without latency.",
    ]


REPRODUCTION = Reproduction(
    name="hsdp",
    title="HSDP between two sites",
    source="This project: `commhooks.attach_replicas`; a report of HSDP over Ethernet: "
    "https://github.com/NVIDIA/cosmos-framework/pull/162",
    said=(
        "The report: on 2 nodes of 8 A100 over Ethernet, a step of HSDP took 22.2 s, and one of four batches 54.3 s if "
        "only the last one is averaged between nodes, in place of four times 22.2 s.",
        "From these two figures it derives 10.8 s of compute and 11.4 s of synchronisation for each batch.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(limited=False, ranks_per_site=1, rates=("100Mbit/s",), task="gpt:size=tiny",
                         hooks=("all-reduce", "int8"), turns=2, models=("70M (Pythia)",)),
    },
    measure=measure,
    show=show,
)  # fmt: skip
