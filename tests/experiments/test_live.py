"""What the terminal shows while runs go, rendered at several widths; time is a number that the tests set."""

from __future__ import annotations

import dataclasses
from io import StringIO

import pytest
from experiments.sweeps.pace import Pace
from rich.console import Console

from experiments.runs import RunResult, RunSettings
from experiments.specs import Spec
from experiments.sweeps.execute import RunFailed
from experiments.sweeps.live import Live, listeners, short_labels
from experiments.training.worker import Evaluated, RunDone, StepDone
from tests.experiments.synthetic import DENSE_BYTES, result

HOOKS = (
    "all-reduce",
    "fp16",
    "powersgd:policy=fused,rank=1,start_after=5",
    "powersgd:policy=fused,rank=4,start_after=5",
    *(f"top-k:ratio={n / 1000}" for n in range(1, 9)),
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def console(width: int = 80, height: int = 24, *, terminal: bool = False) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=width, height=height, force_terminal=terminal, _environ={}), out


def drawn(live: Live, width: int, height: int = 24) -> list[str]:
    shown, out = console(width, height)
    shown.print(live.drawn())
    return out.getvalue().splitlines()


def after_ten_steps(width: int, height: int = 24, *, steps: int = 40) -> list[str]:
    """Return what is shown after ten steps and an evaluation of every hook but the last, which has not begun."""
    results = [result(hook) for hook in HOOKS]
    results = [dataclasses.replace(one, settings=dataclasses.replace(one.settings, steps=steps)) for one in results]
    runs = [one.settings for one in results]
    live = Live(runs, {}, console(width, height)[0], clock=Clock())
    for one in results[:-1]:
        for step in one.steps[:10]:
            live(one.settings, StepDone(0, step))
        live(one.settings, Evaluated(0, one.evaluations[0], None))
    return drawn(live, width, height)


@pytest.mark.parametrize("width", [80, 160])
def test_every_hook_of_the_scene_has_a_row_that_fits(width: int) -> None:
    lines = after_ten_steps(width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert lines[2].split() == ["hook", "step", "loss", "step", "time", "sent/s", "link", "held-out"]
    steps = result().steps[:10]
    seconds = sum(step.seconds for step in steps)
    assert lines[3].split() == [
        "all-reduce",
        "10/40",
        f"{sum(step.loss for step in steps) / 10:.3f}",
        *f"{100 * seconds:.0f} ms".split(),
        *f"{10 * DENSE_BYTES / seconds / 1e6:.1f} MB/s".split(),
        *f"{100 * 8 * 10 * DENSE_BYTES / seconds / 100e6:.0f} %".split(),
        f"{result().evaluations[0].loss:.3f}",
    ]
    assert lines[3 + len(HOOKS) - 1].split()[1:] == ["0/40", "–", "–", "–", "–", "–"]


def test_a_name_too_long_for_its_column_loses_what_it_shares_with_others() -> None:
    wide, narrow = "\n".join(after_ten_steps(160)), "\n".join(after_ten_steps(80))
    assert HOOKS[3] in wide
    assert HOOKS[3] not in narrow
    assert "powersgd:rank=4 " in narrow
    hooks = [Spec.parse(hook) for hook in HOOKS]
    assert short_labels(hooks, room=100) == list(HOOKS)
    assert len(set(short_labels(hooks, room=0))) == len(HOOKS)


def test_many_steps_take_their_room_from_the_names_only() -> None:
    lines = after_ten_steps(80, steps=100_000)
    assert max(map(len, lines)) <= 80
    assert "10/100000" in lines[3].split()
    assert lines[3].endswith(f"{result().evaluations[0].loss:.3f}")


def test_a_terminal_with_fewer_lines_than_hooks_shows_those_in_progress() -> None:
    lines = after_ten_steps(80, height=15)
    assert len(lines) == 15
    assert lines[-1] == "and 1 hook more"
    assert not any("0/40" in line.split() for line in lines)


def test_a_narrow_terminal_leaves_columns_out() -> None:
    lines = after_ten_steps(60)
    assert lines[2].split() == ["hook", "step", "loss", "step", "time", "held-out"]
    assert not any("…" in line for line in lines[2:])


def test_a_link_without_a_rate_has_no_use() -> None:
    one = result(link="unlimited")
    live = Live([one.settings], {}, console()[0], clock=Clock())
    live(one.settings, StepDone(0, one.steps[0]))
    assert "–" in drawn(live, 80)[3]
    assert "%" not in drawn(live, 80)[3]


def test_a_run_made_again_begins_anew_and_what_ended_is_counted() -> None:
    old, bad, good = result("fp16"), result("bad"), result()
    live = Live([old.settings, bad.settings, good.settings], {old.settings: old}, console()[0], clock=Clock())
    for step in (*good.steps[:30], good.steps[0]):
        live(good.settings, StepDone(0, step))
    live(bad.settings, RunFailed("Traceback:\nValueError: no"))
    lines = drawn(live, 120)
    assert "2 of 3 runs · 1 failed" in lines[0]
    assert [line.split()[:3] for line in lines[3:]] == [
        ["fp16", "40/40", f"{sum(step.loss for step in old.steps[-10:]) / 10:.3f}"],
        ["bad", "failed", "–"],
        ["all-reduce", "1/40", f"{good.steps[0].loss:.3f}"],
    ]


def test_without_a_terminal_every_run_leaves_one_line_and_with_quiet_none() -> None:
    fast, slow = result(link="1Gbit/s"), result(link="10Mbit/s")
    for quiet, lines in ((True, 0), (False, 2)):
        shown, out = console(40)
        with Live([fast.settings, slow.settings], {}, shown, quiet=quiet) as live:
            live(fast.settings, StepDone(0, fast.steps[0]))
            live(fast.settings, RunDone(0, fast))
            live(slow.settings, RunFailed("Traceback:\nValueError: no"))
        assert len(out.getvalue().splitlines()) == lines
    first, second = out.getvalue().splitlines()
    assert first.startswith(f"gpt · all-reduce · seed 0 · link {fast.settings.link.label}: 40 steps in ")
    assert first.endswith("held-out loss 2.105")
    assert second.endswith(f"link {slow.settings.link.label}: failed: ValueError: no")


def test_under_torchrun_only_rank_0_shows_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    run = result()
    monkeypatch.setenv("WORLD_SIZE", "2")
    shown = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        to, out = console(terminal=True)
        with Live([run.settings], {}, to) as live:
            live(run.settings, RunDone(0, run))
        shown.append(out.getvalue())
    assert "40 steps" in shown[0]
    assert shown[1] == ""


def test_a_terminal_has_its_cursor_again_after_ctrl_c() -> None:
    run = result()
    shown, out = console(terminal=True)
    live = Live([run.settings], {}, shown)
    with pytest.raises(KeyboardInterrupt), live:
        raise KeyboardInterrupt
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().rindex(show) > out.getvalue().rindex(hide)


def test_listeners_hear_every_message_in_order() -> None:
    heard: list[tuple[int, RunSettings, object]] = []
    settings = result().settings
    listeners(lambda *message: heard.append((1, *message)), lambda *message: heard.append((2, *message)))(settings, "x")
    assert heard == [(1, settings, "x"), (2, settings, "x")]


def take_turns(pace: Pace, clock: Clock, scene: list[RunResult], seconds: float, *, starting: float) -> None:
    """Make all steps of a scene; each turn takes `seconds`, and `starting` comes before the first."""
    clock.now += starting
    for turns in zip(*(one.steps for one in scene), strict=True):
        for one, step in zip(scene, turns, strict=True):
            clock.now += seconds
            pace.hear(one.settings, StepDone(0, step))
    for one in scene:
        pace.end(one.settings)


def test_the_time_left_is_the_turns_left_and_what_scenes_to_come_take_to_begin() -> None:
    clock = Clock()
    scenes = [[result(hook, seed=seed) for hook in ("all-reduce", "fp16")] for seed in range(3)]
    pace = Pace([one.settings for scene in scenes for one in scene], {}, clock)
    assert pace.seconds_left() is None
    take_turns(pace, clock, scenes[0], 0.5, starting=7)
    assert pace.seconds_left() == pytest.approx(2 * 2 * 40 * 0.5), "the first scene begins with starting processes"
    clock.now += 30
    assert pace.seconds_left() == pytest.approx(80 - 30)
    take_turns(pace, clock, scenes[1], 0.5, starting=2)
    assert pace.seconds_left() == pytest.approx(2 * 40 * 0.5 + 30 + 2 + 2 * 0.5)
    take_turns(pace, clock, scenes[2], 0.5, starting=0)
    assert pace.seconds_left() == 0


def test_the_silence_before_a_failure_is_no_runs_turn() -> None:
    clock = Clock()
    scene = [result(), result("fp16")]
    pace = Pace([one.settings for one in scene], {}, clock)
    for step in scene[0].steps[:2]:
        clock.now += 0.5
        pace.hear(scene[0].settings, StepDone(0, step))
    before = pace.seconds_left()
    clock.now += 600
    pace.hear(scene[1].settings, RunFailed("ranks 0, 1 reported nothing"))
    assert pace.seconds_left() == before
    pace.end(scene[1].settings)
    assert pace.seconds_left() == pytest.approx(38 * 0.5)


def test_the_time_on_another_link_differs_by_the_time_of_the_bytes() -> None:
    clock = Clock()
    known, unknown = result(link="100Mbit/s"), result(link="10Mbit/s")
    pace = Pace([known.settings, unknown.settings], {known.settings: known}, clock)
    here = sum(step.seconds for step in known.steps) / 40
    slower = 8 * DENSE_BYTES * (1 / 10e6 - 1 / 100e6)
    assert pace.seconds_left() == pytest.approx(40 * (here + slower))


def test_another_hook_is_expected_to_take_as_long_as_the_most_similar_run() -> None:
    other_task, same_task = result(task="digits"), result(hook="fp16")
    wanted = result(hook="sign")
    runs = [one.settings for one in (other_task, same_task, wanted)]
    pace = Pace(runs, {one.settings: dataclasses.replace(one, dilation=10.0) for one in (other_task,)}, Clock())
    assert pace.seconds_left() == pytest.approx(80 * 10 * sum(step.seconds for step in other_task.steps) / 40)
    pace = Pace(runs, {other_task.settings: other_task, same_task.settings: same_task}, Clock())
    assert pace.seconds_left() == pytest.approx(sum(step.seconds for step in same_task.steps))


def test_without_a_terminal_a_line_a_minute_says_how_far_the_runs_are() -> None:
    clock, (shown, out), one = Clock(), console(), result()
    live = Live([one.settings], {}, shown, clock=clock)
    for number, step in enumerate(one.steps[:7]):
        clock.now = 20.0 * number
        live(one.settings, StepDone(0, step))
    lines = out.getvalue().splitlines()
    assert [line.partition(" · 0 of 1 run · ")[0] for line in lines] == [
        f"{one.settings.label}: step {step}/{one.settings.steps}" for step in (4, 7)
    ]
    assert "0:01:00" in lines[0] and "0:02:00" in lines[1]
