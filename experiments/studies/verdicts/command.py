"""The study `verdicts`: how often the verdict of a comparison is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from commhooks.experiments.results.verdicts import Verdict
from experiments.studies.blocks import Block, Table, markdown
from experiments.studies.verdicts.counting import Count, Recorded, of_nulls, of_recorded, of_repetitions
from experiments.studies.verdicts.recording import COMPARISONS, record, recorded

FOLDER = Path("docs/reproductions/verdicts")
PAGE = Path("docs/reproductions/verdicts.md")


def verdicts(
    seeds: Annotated[int, typer.Option(help="Repetitions that there are to be: what is missing is run.")] = 0,
    folder: Annotated[Path, typer.Option(help="Has the runs, and receives new ones.")] = FOLDER,
    page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE,
) -> None:
    """Repeat three comparisons at other seeds, and count right, wrong and open verdicts (four minutes a seed)."""
    for seed in range(1, seeds + 1):
        for comparison in COMPARISONS:
            typer.echo(f"{comparison}, seed {seed}: {record(comparison, seed, folder)}")
    page.write_text(text(folder), encoding="utf-8")
    typer.echo(f"page  {page}")


def text(folder: Path) -> str:
    """Return the page of a folder's runs."""
    return "# How often a verdict is right\n\n" + markdown(_blocks(folder))


def _blocks(folder: Path) -> Iterable[Block]:
    found = recorded(folder)
    number = max((len(runs) for hooks in found.values() for runs in hooks.values()), default=0)
    yield (
        "A verdict is right if it is the verdict of all repetitions taken together, which has the scatter over seeds "
        "in it. Where that one is open, a settled verdict counts as neither. Made by "
        "`python -m experiments.studies verdicts --seeds 10`; all the data is in the folder `verdicts` beside this "
        "page's source, so that the rule can be changed and counted again without training."
    )
    yield "## Whole comparisons, repeated"
    yield (
        f"`commhooks compare` at {number} seeds: the demo (digits and gpt at 100 Mbit/s) and two tasks written as a "
        "user writes them, a GPT of 1.3 million parameters under AdamW at 200 Mbit/s and a perceptron of 670,000 "
        "under SGD with momentum at 100 Mbit/s. One seed decides, as in the demo. Other programs used the machine "
        "meanwhile: up to eleven processes wanted to run on its two cores."
    )
    single = of_repetitions(found)
    yield _table(single)
    yield _sentence("One seed", single.values())
    for several in (2, 3):
        yield _sentence(f"{several} seeds", of_repetitions(found, several).values())
    demo = [_open_in_demo(single, turn) for turn in range(number)]
    yield f"Of the demo's eight verdicts {', '.join(map(str, demo))} were open in its repetitions."
    runs = Recorded(folder / "curves.npz")
    yield "## Recorded runs, resampled"
    yield (
        "Losses of 6 to 11 seeds, with step times drawn in blocks of ten from recorded turns, on a machine that other "
        "programs used: 12 draws of one seed for each setting."
    )
    resampled = of_recorded(runs)
    yield _table({(f"{task}, {link}", hook): count for (task, link, hook), count in resampled.items()})
    yield _sentence("All settings", resampled.values())
    yield _sentence("Steps not within 15 % of the baseline's", [o for o in resampled.values() if not o.is_close])
    yield "## All-reduce against itself"
    yield (
        "Runs of all-reduce on two tasks in pairs, each with the times of all-reduce that was run twice in the same "
        "comparison."
    )
    columns = ["the other run has", "pairs", *(one.value for one in (Verdict.PAYS, Verdict.COSTS, Verdict.OPEN))]
    rows = [
        [kind, str(len(said)), *(str(said.count(one)) for one in (Verdict.PAYS, Verdict.COSTS, Verdict.OPEN))]
        for kind, said in of_nulls(runs).items()
    ]
    yield Table("", columns, rows)


def _table(counts: Mapping[tuple[str, str], Count]) -> Table:
    rows = [
        [
            setting,
            f"`{hook}`",
            f"{count.speed_up:.2f}",
            count.truth.value,
            str(count.right),
            str(count.wrong),
            str(count.open),
        ]
        for (setting, hook), count in counts.items()
    ]
    return Table("", ["task and link", "hook", "speed-up", "all together", "right", "wrong", "open"], rows)


def _sentence(what: str, counts: Iterable[Count]) -> str:
    settled = [one for one in counts if one.truth is not Verdict.OPEN]
    every = sum(len(one.verdicts) for one in settled)
    if not every:
        return f"{what}: nothing is settled."
    right, wrong, undecided = (
        100 * sum(getattr(one, kind) for one in settled) / every for kind in ("right", "wrong", "open")
    )
    return f"{what}: of {every} verdicts {right:.1f} % are right, {wrong:.1f} % wrong and {undecided:.1f} % open."


def _open_in_demo(counts: Mapping[tuple[str, str], Count], turn: int) -> int:
    demo = [count for (setting, _), count in counts.items() if setting.startswith(("digits,", "gpt,"))]
    return sum(count.verdicts[turn] is Verdict.OPEN for count in demo if turn < len(count.verdicts))
