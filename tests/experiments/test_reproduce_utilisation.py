"""What the page on DiLoCo's utilisation finds in made-up measurements."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.studies.blocks import Table
from experiments.studies.reproduce import load_reproduction
from experiments.studies.reproduce.utilisation_ranks import Settings

DENSE, POWERSGD, DILOCO = "all-reduce", "powersgd:rank=4", "diloco:every=30"
STREAMED = "diloco:every=30,fragments=3,delay=5"
SETTINGS = Settings(hooks=(POWERSGD, STREAMED), slow=(DENSE, DILOCO))
A_STEP = 0.1


def turns(steps: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """Return eight turns that take so many seconds and send 1 MB, which the interface counts as 1.07."""
    values = {"nothing": 30 * A_STEP, "seconds": seconds, "beginning": 0.01, "ending": 0.5, "moved": 1e6}
    lists = {name: [value] * 8 for name, value in ({"carried": 1.07e6} | values | changes).items()}
    return {"steps": steps, "peak": 0.0, "shares": [1.0], **lists}


def measurements(streamed: float = 3.2, carried: float = 1.07e6) -> dict[str, Any]:
    """Return measurements in which 30 steps take 3 s without communication, and 6 s with DiLoCo.

    An all-reduce of 400 kB a rank between four ranks at 10 Mbit/s takes half a second.
    """
    bucket = {"ready": 0.0, "stages": [{"seconds": 0.0, "collectives": [["all-reduce", 400_000]]}], "after": 0.0}
    own = turns(30, streamed, carried=carried) | {"peak": 50_000.0, "shares": [0.25, 0.25, 0.5]}
    profile = {"cores": 1, "step": A_STEP, "exchanges": {DENSE: [bucket]}, "added": {DENSE: 0.9, POWERSGD: 0.1}}
    return {
        "profile": profile,
        "free": {STREAMED: turns(30, 3.0, ending=0.2)},
        "limited": {POWERSGD: turns(10, 2.0), STREAMED: own},
        "slow": {DENSE: turns(2, 2.0), DILOCO: turns(30, 6.0)},
    }


def shown(measured: dict[str, Any]) -> tuple[dict[str, list[str]], dict[str, list[str]], str]:
    """Return the rows of both tables by hook, and all sentences."""
    blocks = load_reproduction("diloco-utilisation").show(SETTINGS, measured)
    times, sent = [
        {row[0].strip("`"): list(row[1:]) for row in block.rows} for block in blocks if isinstance(block, Table)
    ]
    return times, sent, "\n".join(block for block in blocks if isinstance(block, str))


def test_utilisation_is_a_step_without_communication_over_one_with_it_however_long_turns_are() -> None:
    times, _, text = shown(measurements())
    assert {hook: row[3] for hook, row in times.items()} == {
        DENSE: "10.0 % (10 to 10)",
        DILOCO: "50.0 % (50 to 50)",
        POWERSGD: "50.0 % (50 to 50)",
        STREAMED: "93.8 % (94 to 94)",
    }
    assert "93.8 %, is computed with `diloco:every=30,fragments=3,delay=5`. The goal of 90.0 % is met." in text
    assert "The goal of 90.0 % is missed." in shown(measurements(streamed=3.5))[-1]


def test_predictions_are_those_of_the_step_time_model_with_the_fragments_as_they_are() -> None:
    """Hooks of every step take the link's part in addition; a fragment of half the parameters is hidden in 0.5 s."""
    times, _, _ = shown(measurements())
    assert times[DENSE][4] == "10.0 %" and times[POWERSGD][4] == "50.0 %"
    exchange = 8 * (1.5 * 400_000 * (1514 / 1448 + 66 / 1448 / 2) + 12 * 390) / 10e6
    assert float(times[DILOCO][4].split()[0]) == pytest.approx(100 * 3 / (3 + exchange), abs=0.06)
    assert exchange / 2 < 5 * A_STEP and times[STREAMED][4] == "100.0 %"
    measured = measurements()
    measured["limited"][STREAMED]["shares"] = [0.0, 0.0, 1.0]
    lost = exchange - 5 * A_STEP
    assert float(shown(measured)[0][STREAMED][4].split()[0]) == pytest.approx(100 * 3 / (3 + lost), abs=0.06)


def test_the_interfaces_counters_are_compared_after_packet_headers() -> None:
    _, sent, text = shown(measurements())
    assert sent[STREAMED] == ["33.3", "1.070", "4.00"], "50 kB in a step of 0.1 s"
    assert sent[DILOCO] == ["33.3", "1.070", ""]
    assert "off by at most 0.2 % " in text and "goal: 5.0 %, met)" in text
    text = shown(measurements(carried=1.2e6))[-1]
    assert f"off by at most 12.3 % (`{STREAMED}`; goal: 5.0 %, missed)" in text
