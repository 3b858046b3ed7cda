"""The study `advice`: whether the pages, `commhooks plan` and `commhooks compare` advise the same, in ten settings.

A setting is a model on two ranks over a link. `plan --parameters` computes from tables, and the pages show that;
`plan --task` profiles the task; `compare` trains it. What each knows of every hook is stored, and advised on anew.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from commhooks.experiments.accuracy import Accuracy
from commhooks.experiments.advice import FEEDBACK, Advice, Option, advise, line_of, predicted
from commhooks.experiments.links.link import LinkSettings, format_rate
from commhooks.experiments.planning.predicting import CHECKED_RATES
from commhooks.experiments.results.outcomes import settings_of
from commhooks.experiments.results.verdicts import UNKNOWN, Judged, Range, Verdict
from commhooks.experiments.sweeps.store import read_results
from commhooks.units import three_digits


class Model(NamedTuple):
    """A task, and what `plan --parameters` is told of it."""

    task: str
    words: str
    parameters: str
    compute: str
    optimizer: str = ""  # of `compare`; empty: the task's own


MEDIUM = Model("gpt:size=medium", "a GPT of 1.9 million parameters", "1.89M", "50ms")
BASE = Model("gpt:size=base", "a GPT of 4.1 million", "4.1M", "95ms")
RESNET = Model("digits:network=resnet18,batch_size=16", "a ResNet-18 of 11 million", "11.2M", "230ms", "sgd:lr=0.01")
STEPS: Mapping[tuple[Model, str], int] = {
    (MEDIUM, "10Mbit/s"): 16,
    (MEDIUM, "100Mbit/s"): 24,
    (MEDIUM, "1Gbit/s"): 40,
    (MEDIUM, "25Gbit/s"): 0,  # no rate that can be emulated here, so nothing is trained
    (BASE, "100Mbit/s"): 24,
    (BASE, "1Gbit/s"): 32,
    (BASE, "10Gbit/s"): 0,
    (RESNET, "100Mbit/s"): 20,
    (RESNET, "1Gbit/s"): 60,
    (RESNET, "10Gbit/s"): 0,
}
"""The ten settings, with the steps for which `compare` trains."""
HOOKS = ("fp16", "int8", "powersgd:policy=fused,rank=4")
WAYS = {"parameters": "`plan --parameters` and the pages", "profile": "`plan --task`", "compare": "`compare`"}
FOLDER = Path("docs/guide/choosing")
_SETTINGS = "settings.json"
_SECONDS = "60"  # of profiling

Case = Mapping[str, Any]  # task, words, link, and by way what is known of each hook


def advice(
    measure: Annotated[bool, typer.Option("--measure", help="Ask anew; without it, only write the tables.")] = False,
    runs: Annotated[Path | None, typer.Option(help="Keeps the runs of compare, and continues them.")] = None,
    folder: Annotated[Path, typer.Option(help="Has what was found, and receives the tables.")] = FOLDER,
) -> None:
    """Ask plan and compare which hook to use in ten settings, and write the tables of the pages (half an hour)."""
    if measure:
        with tempfile.TemporaryDirectory() as scratch:
            found = [_asked(model, link, Path(runs or scratch), Path(scratch)) for model, link in STEPS]
        (folder / _SETTINGS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    cases = read(folder)
    tables = {"by-link.md": by_link(cases), "by-optimizer.md": by_optimizer(), "agreement.md": agreement(cases)}
    for name, text in tables.items():
        (folder / name).write_text(text, encoding="utf-8")
    typer.echo(agreement(cases))


def read(folder: Path = FOLDER) -> list[Case]:
    """Return what was found in each setting."""
    found: list[Case] = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    return found


def advised(case: Case, way: str) -> Advice | None:
    """Return the advice of one way of asking; None: it could not be asked."""
    if way not in case:
        return None
    tables = Accuracy.read()
    return advise([_option(one, tables) for one in case[way]], unchecked=_unchecked(case["link"]))


def by_link(cases: Sequence[Case]) -> str:
    """Return the table of the pages: what to use on each link, and what would be faster at some cost."""
    rows = []
    for link in sorted({case["link"] for case in cases}, key=_rate):
        own = [case for case in cases if case["link"] == link]
        found = [(case, advised(case, "parameters")) for case in own]
        use, faster = (
            _grouped([(case, getattr(one, kind)) for case, one in found if one is not None])
            for kind in ("hook", "faster")
        )
        rows.append([format_rate(_rate(link)), _MEASURE if _unchecked(link) else use or "nothing", faster or "—"])
    return _table(["link", "use", "faster still, at some cost"], rows)


def by_optimizer() -> str:
    """Return the table of error feedback by optimizer."""
    rows = []
    for family, words in (("adam", "Adam, AdamW and others with second moments"), ("sgd", "SGD with momentum")):
        hooks = {wanted: [name for name, one in FEEDBACK[family].items() if one is wanted] for wanted in (False, True)}
        other = [name for name in _OF_THE_STUDY if name not in FEEDBACK[family]]
        rows.append([words, *(", ".join(f"`{one}`" for one in names) or "—" for names in (*hooks.values(), other))])
    return _table(["optimizer", "off", "on", "not settled: compare both"], rows)


def agreement(cases: Sequence[Case]) -> str:
    """Return a table of what each way of asking advises, setting by setting, and how often it is what the pages say."""
    rows = []
    same: dict[str, list[bool]] = {way: [] for way in WAYS if way != "parameters"}
    for case in cases:
        found = {way: advised(case, way) for way in WAYS}
        pages = found["parameters"]
        for way, agreed in same.items():
            one = found[way]
            if one is not None and pages is not None:
                agreed.append(
                    (one.hook, one.rank, one.policy, one.line) == (pages.hook, pages.rank, pages.policy, pages.line)
                )
        texts = ["—" if one is None else _in_cell(one) for one in found.values()]
        rows.append([f"`{case['task']}`", format_rate(_rate(case["link"])), *texts])
    table = _table(["model", "link", *WAYS.values()], rows)
    counts = " and ".join(f"{WAYS[way]} in {sum(agreed)} of {len(agreed)}" for way, agreed in same.items())
    whole = f"What comes first is the pages' hook, rank, policy and line under {counts} settings."
    return f"{table}\n{whole} —: a link of that rate cannot be emulated here.\n"


_OF_THE_STUDY = ("sign", "int4", "top-k", "powersgd")
_MEASURE = "predictions were never checked at this rate: measure with `commhooks compare`"


def _asked(model: Model, link: str, runs: Path, scratch: Path) -> Case:
    """Ask in one setting."""
    case: dict[str, Any] = {"task": model.task, "words": model.words, "link": link}
    hooks = [word for hook in HOOKS for word in ("--hook", hook)]
    of_tables = ["--parameters", model.parameters, "--compute", model.compute, "--ranks", "2"]
    of_task = ["--task", model.task, "--ranks", "2", "--seconds", _SECONDS]
    case["parameters"] = _planned([*of_tables, "--link", link, *hooks], scratch)
    if steps := STEPS[model, link]:
        case["profile"] = _planned([*of_task, "--link", link, *hooks], scratch)
        out = runs / f"{model.task}-{link}".replace("/", "-").replace(":", "-")
        asked = ["--task", model.task, "--rate", link, "--steps", str(steps), "--seeds", "1", "--hook", "all-reduce"]
        asked += ["--optimizer", model.optimizer] if model.optimizer else []
        _commhooks("compare", *asked, *hooks, "--out", str(out))
        case["compare"] = _judged(out)
    return case


def _planned(options: Sequence[str], scratch: Path) -> list[dict[str, Any]]:
    """Return the speed-ups that `commhooks plan` predicts."""
    file = scratch / "plan.json"
    file.unlink(missing_ok=True)
    _commhooks("plan", *options, "--json", str(file))
    (plan,) = json.loads(file.read_text(encoding="utf-8"))["plans"]
    return [
        {"hook": one["label"], "speed_up": _ends(predicted(one["speed_up"], one["deviation"]))}
        for one in plan["choices"]
        if one["label"] != plan["compared"]
    ]


def _judged(folder: Path) -> list[dict[str, Any]]:
    """Return what runs say of every hook."""
    (setting,) = settings_of(read_results([folder]))
    return [
        {
            "hook": hook,
            "speed_up": _ends(one.speed_up),
            "verdict": one.verdict.value,
            "why": one.why,
            "equal_steps": _ends(one.equal_steps),
            "margin": one.margin,
        }
        for hook, one in setting.judged.items()
    ]


def _option(stored: Mapping[str, Any], tables: Accuracy) -> Option:
    hook, speed_up = stored["hook"], Range(*stored["speed_up"])
    if "verdict" not in stored:
        return Option(hook=hook, speed_up=speed_up, costs=tables.costs_of(hook))
    verdict, loss = Verdict(stored["verdict"]), Range(*stored["equal_steps"])
    judged = Judged(verdict, stored["why"], speed_up, loss, UNKNOWN, stored["margin"])
    return Option.measured(hook, judged, tables.costs_of(hook))


def _ends(found: Range) -> list[float]:
    return [found.mean, found.low, found.high]


def _commhooks(*words: str) -> None:
    subprocess.run([sys.executable, "-c", "import commhooks_command as c; c.main()", *words], check=True)


def _unchecked(link: str) -> str:
    low, high = CHECKED_RATES
    return "" if low <= _rate(link) <= high else "predictions were never compared with real steps at this rate"


def _rate(link: str) -> float:
    return LinkSettings.parse(link).slowest or math.inf


def _in_cell(one: Advice) -> str:
    """Return an advice in a cell: the hook, and the one that is faster at some cost."""
    hooks = [f"`{hook}`" for hook in (one.hook, one.faster) if hook]
    return ", then ".join(hooks) or ("measure" if one.sentence.startswith("Not checked") else "nothing")


def _grouped(chosen: Iterable[tuple[Case, str | None]]) -> str:
    """Return the lines to type with the speed-ups of the models for which they are advised, and what they cost."""
    groups: dict[str, list[Case]] = {}
    for case, hook in chosen:
        if hook is not None:
            groups.setdefault(hook, []).append(case)
    tables, said = Accuracy.read(), []
    for hook, cases in groups.items():
        times = [
            three_digits(one["speed_up"][0]) for case in cases for one in case["parameters"] if one["hook"] == hook
        ]
        times.sort(key=float)
        costs = [str(one) for one in tables.costs_of(hook) if one.high > one.margin]
        models = f" ({' and '.join(case['words'] for case in cases)})" if len(groups) > 1 else ""
        fast = " to ".join(dict.fromkeys((times[0], times[-1])))
        cost = f"; it cost {' and '.join(costs)}" if costs else ""
        said.append(f"`{line_of(hook)}`: {fast} times as fast{models}{cost}")
    return "<br>".join(said)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *rows]) + "\n"
