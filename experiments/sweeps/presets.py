"""Sweeps by name: each is a function that returns runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commhooks.units import unknown

from ..links.text import DEFAULT_LINK
from ..runs import RunSettings
from .plan import plan

DEFAULT_TASKS = ("digits", "gpt")
DEFAULT_HOOKS = ("all-reduce", "fp16", "bf16", "powersgd:rank=1,start_after=5", "powersgd:rank=4,start_after=5")
SHARDED_HOOKS = ("bf16", "int8", "int4")
_LOW_RANK = "powersgd:rank=4,start_after=2"


def demo() -> tuple[RunSettings, ...]:
    """Return two tasks under five hooks on 2 ranks at 100 Mbit/s: the runs of `commhooks compare`."""
    return plan(DEFAULT_TASKS, DEFAULT_HOOKS, links=[DEFAULT_LINK])


def quick() -> tuple[RunSettings, ...]:
    """Return a small network under four hooks with two seeds: about a minute, for a first look."""
    hooks = ["all-reduce", "fp16", "top-k:ratio=0.01", "powersgd:rank=2,start_after=5"]
    return plan(["digits:size=small"], hooks, links=["10Mbit/s"], seeds=range(2))


def slow_links(kind: str = "hosts") -> tuple[RunSettings, ...]:
    """Return a GPT of 4 million parameters on 2 and 4 hosts over three links, with three seeds: about an hour.

    Args:
        kind: The kind of the links: "hosts" for network namespaces, which need root, or "emulated".

    """
    hooks = ["all-reduce", "fp16", "top-k:ratio=0.01", _LOW_RANK, "powersgd:rank=4,alternating=true,start_after=2"]
    # At 10 Mbit/s an all-reduce takes 14 and 21 s, so these runs are short, and without fp16, which takes half of that.
    scenes = [(rate, ranks, 60, hooks) for rate in ("100Mbit/s", "1Gbit/s") for ranks in (2, 4)]
    scenes += [("10Mbit/s", ranks, steps, [hooks[0], *hooks[2:]]) for ranks, steps in ((2, 12), (4, 8))]
    return tuple(run for scene in scenes for run in _on_slow_links(kind, *scene))


def slow_links_long(kind: str = "hosts") -> tuple[RunSettings, ...]:
    """Return the same GPT under all-reduce and PowerSGD for its own 200 steps at 100 Mbit/s: three quarters of an hour.

    Args:
        kind: As for `slow_links`.

    """
    return tuple(
        run for ranks in (4, 2) for run in _on_slow_links(kind, "100Mbit/s", ranks, 200, ["all-reduce", _LOW_RANK])
    )


def _on_slow_links(kind: str, rate: str, ranks: int, steps: int, hooks: Sequence[str]) -> tuple[RunSettings, ...]:
    return plan(
        ["gpt:size=base"],
        hooks,
        ranks=[ranks],
        links=[f"{kind}:rate={rate}"],
        seeds=range(3),
        steps=steps,
        evaluate_every=max(4, steps // 5),
        bucket_cap_mb=6.0,  # small enough for most buckets to travel during the backward pass
    )


PRESETS: dict[str, Callable[[], tuple[RunSettings, ...]]] = {
    "demo": demo,
    "quick": quick,
    "slow-links": slow_links,
    "slow-links-long": slow_links_long,
}


def preset(name: str) -> tuple[RunSettings, ...]:
    """Return the runs of a preset.

    Raises:
        ValueError: There is no preset of this name.

    """
    if name not in PRESETS:
        raise ValueError(unknown("preset", name, PRESETS))
    return PRESETS[name]()
