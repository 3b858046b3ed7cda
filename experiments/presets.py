"""Sweeps by name: each is a function that returns runs."""

from __future__ import annotations

from collections.abc import Callable

from .plan import plan
from .runs import RunSettings
from .specs import unknown

DEFAULT_TASKS = ("digits", "gpt")
DEFAULT_HOOKS = ("all-reduce", "fp16", "bf16", "powersgd:rank=1,start_after=5", "powersgd:rank=4,start_after=5")


def demo() -> tuple[RunSettings, ...]:
    """Return two tasks under five hooks on 2 ranks at 100 Mbit/s: what `commhooks compare` runs."""
    return plan(DEFAULT_TASKS, DEFAULT_HOOKS, links=["100Mbit/s,latency=0.2ms"])


def quick() -> tuple[RunSettings, ...]:
    """Return a small network under four hooks with two seeds: about a minute, to see what comes out."""
    hooks = ["all-reduce", "fp16", "top-k:ratio=0.01", "powersgd:rank=2,start_after=5"]
    return plan(["digits:size=small"], hooks, links=["10Mbit/s"], seeds=range(2))


def slow_links(kind: str = "emulated") -> tuple[RunSettings, ...]:
    """Return a GPT of 4 million parameters under seven hooks, on 2 and 4 hosts, over three links, with three seeds.

    Args:
        kind: Of the links: "emulated", or "hosts" for network namespaces.

    """
    return plan(
        ["gpt:width=256,layers=5,heads=8,context=64,batch_size=4"],
        ["all-reduce", "fp16", "int8", "top-k", "powersgd:rank=1", "powersgd:rank=4", "random-k"],
        links=[f"{kind}:rate={rate}" for rate in ("10Mbit/s", "100Mbit/s", "1Gbit/s")],
        ranks=[2, 4],
        seeds=range(3),
        steps=100,
    )


PRESETS: dict[str, Callable[[], tuple[RunSettings, ...]]] = {
    "demo": demo,
    "quick": quick,
    "slow-links": slow_links,
}


def preset(name: str) -> tuple[RunSettings, ...]:
    """Return the runs of a preset.

    Raises:
        ValueError: There is none of this name.

    """
    if name not in PRESETS:
        raise ValueError(unknown("preset", name, PRESETS))
    return PRESETS[name]()
