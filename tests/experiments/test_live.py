"""What the terminal shows while runs go, rendered at several widths; time is a number that the tests set."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from commhooks.experiments.runs import RunResult
from commhooks.experiments.sweeps.execute import RunFailed
from commhooks.experiments.sweeps.live import Live
from commhooks.experiments.training.worker import Evaluated, RunDone, StepDone
from tests.experiments.synthetic import DENSE_BYTES, result

HOOKS = ("all-reduce", "fp16", "powersgd:policy=fused,rank=1,start_after=5", "top-k:ratio=0.01")


def console(width: int = 80, *, terminal: bool = False) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=width, force_terminal=terminal, _environ={}), out


def drawn(live: Live, width: int) -> list[str]:
    shown, out = console(width)
    shown.print(live.drawn)
    return out.getvalue().splitlines()


def take(live: Live, run: RunResult, steps: slice) -> None:
    for step in run.steps[steps]:
        live(run.settings, StepDone(0, step))


@pytest.mark.parametrize("width", [60, 80, 160])
def test_every_hook_of_the_comparison_group_has_a_row_that_fits(width: int) -> None:
    """All but the last have taken ten steps, and were evaluated."""
    runs = [result(hook) for hook in HOOKS]
    live = Live([one.settings for one in runs], {}, console(width)[0], clock=lambda: 0.0)
    for one in runs[:-1]:
        take(live, one, slice(10))
        live(one.settings, Evaluated(0, one.evaluations[0], None))
    whole, *rows = drawn(live, width)
    assert max(map(len, (whole, *rows))) <= width and len(rows) == len(HOOKS)
    assert "0 of 4 runs" in whole
    steps = runs[0].steps[:10]
    seconds = sum(step.seconds for step in steps)
    facts = ["all-reduce", "10/40", "loss", f"{sum(step.loss for step in steps) / 10:.3f}", f"{100 * seconds:.0f}"]
    facts.append("ms/step")
    if width >= 80:
        rate = 10 * DENSE_BYTES / seconds
        facts += [f"{rate / 1e6:.1f}", "MB/s", f"{100 * 8 * rate / 100e6:.0f}", "%"]
        facts += ["held-out", f"{runs[0].evaluations[0].loss:.3f}"]
    assert rows[0].split() == facts
    assert rows[-1].split() == [HOOKS[-1], "0/40"]
    assert (HOOKS[2] in rows[2]) == (width == 160)
    unlimited = Live([(run := result(link="unlimited")).settings], {}, console()[0], clock=lambda: 0.0)
    take(unlimited, run, slice(1))
    assert "%" not in drawn(unlimited, 160)[1]


def test_a_run_made_again_begins_anew_and_what_ended_is_counted() -> None:
    old, bad, good = result("fp16"), result("bad"), result()
    live = Live([old.settings, bad.settings, good.settings], {old.settings: old}, console()[0], clock=lambda: 0.0)
    take(live, good, slice(30))
    take(live, good, slice(1))
    live(bad.settings, RunFailed("Traceback:\nValueError: no"))
    whole, *rows = drawn(live, 120)
    assert "2 of 3 runs, 1 failed" in whole
    assert rows[0].split()[3] == f"{sum(step.loss for step in old.steps[-10:]) / 10:.3f}"
    assert [row.split()[:2] for row in rows] == [["fp16", "40/40"], ["bad", "failed"], ["all-reduce", "1/40"]]


def test_without_a_terminal_every_run_leaves_one_line_and_with_quiet_or_on_another_rank_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, slow = result(link="1Gbit/s"), result(link="10Mbit/s")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, quiet, lines in (("0", True, 0), ("1", False, 0), ("0", False, 2)):
        monkeypatch.setenv("RANK", rank)
        shown, out = console(40)
        with Live([fast.settings, slow.settings], {}, shown, quiet=quiet) as live:
            take(live, fast, slice(1))
            live(fast.settings, RunDone(0, fast))
            live(slow.settings, RunFailed("Traceback:\nValueError: no"))
        assert len(out.getvalue().splitlines()) == lines
    first, second = out.getvalue().splitlines()
    assert first.startswith(f"gpt · all-reduce · seed 0 · link {fast.settings.link.label}: 40 steps in ")
    assert first.endswith("held-out loss 2.105")
    assert second.endswith(f"link {slow.settings.link.label}: failed: ValueError: no")
