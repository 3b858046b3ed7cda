"""Draws the two figures of the landing page from measurements that lie beside this file.

For each RATE, `commhooks compare --task gpt --rate RATE --steps STEPS --hook all-reduce --hook bf16 --hook int8
--hook powersgd:rank=4,start_after=5 --out RUNS/RATE`. Then, in the repository's root:

    python docs/figures/draw.py collect RUNS/*   # writes measured.json
    python docs/figures/draw.py                  # draws it
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from commhooks.experiments.report.plots import THEMES, Theme, canvas, style
from commhooks.experiments.runs import RunResult

HERE = Path(__file__).parent
MEASURED = HERE / "measured.json"
WARM_UP = 8  # steps before PowerSGD and the buckets have settled
CURVES_AT = 100e6  # bit/s: the link of the second figure


def collect(folders: list[Path]) -> None:
    """Write what the figures need of the results in these folders: seconds and losses by step, machine, versions."""
    links: dict[str, Any] = {}
    for path in sorted(path for folder in folders for path in folder.glob("results/*.json")):
        run = RunResult.read(path)
        link = links.setdefault(f"{run.settings.link.bits_per_second:.0f}", {})
        link[run.settings.hook.label] = {
            "seconds": [round(step.seconds, 5) for step in run.steps],
            "compression": [round(step.compression, 5) for step in run.steps],
            "moved_bytes": run.steps[-1].moved_bytes,
            "held_out": [[each.step, round(each.loss, 4)] for each in run.evaluations],
        }
    about = {"parameters": run.parameters, "task": run.description, "versions": run.versions, "machine": run.machine}
    MEASURED.write_text(json.dumps(about | {"links": links}, indent=None, separators=(",", ":")) + "\n")


def speed_up(measured: dict[str, Any], theme: Theme) -> matplotlib.figure.Figure:
    """Return the first figure: how many times as fast as an all-reduce a step is, by the rate of the link."""
    figure, axes = canvas("Speed of a step, against an all-reduce", "rate of the link", 6.4, 4.0)
    links = sorted((float(rate), hooks) for rate, hooks in measured["links"].items())
    for number, hook in enumerate(list(links[0][1])[1:]):
        ratios = []
        for _, hooks in links:
            pairs = list(zip(hooks["all-reduce"]["seconds"], hooks[hook]["seconds"], strict=True))[WARM_UP:]
            ratios.append(statistics.quantiles([dense / seconds for dense, seconds in pairs], n=4))
        low, middle, high = zip(*ratios, strict=True)
        rates = [rate for rate, _ in links]
        axes.fill_between(rates, low, high, color=theme.hooks[number], alpha=0.18, linewidth=0)
        axes.plot(rates, middle, marker="o", markersize=4, color=theme.hooks[number], label=hook.split(",")[0])
    axes.axhline(1, color=theme.first, linewidth=1.2)
    note = "below this line the all-reduce is faster"
    axes.annotate(note, (links[0][0], 1), xytext=(0, -11), textcoords="offset points", fontsize=8, color=theme.ink)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([rate for rate, _ in links], [_in_words(rate) for rate, _ in links])
    axes.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5×", "1×", "2×", "5×", "10×", "20×"])
    axes.minorticks_off()
    axes.legend(loc="upper right")
    return figure


def loss_by_time(measured: dict[str, Any], theme: Theme) -> matplotlib.figure.Figure:
    """Return the second figure: held-out loss over training time on one link."""
    title = f"Held-out loss over time, at {_in_words(CURVES_AT)}"
    figure, axes = canvas(title, "training time in seconds", 6.4, 4.0)
    for number, (hook, run) in enumerate(measured["links"][f"{CURVES_AT:.0f}"].items()):
        passed = list(accumulate(run["seconds"]))
        x, y = zip(*((passed[step - 1], loss) for step, loss in run["held_out"]), strict=True)
        colour = theme.hooks[number - 1] if number else theme.first
        axes.plot(x, y, marker="o", markersize=4, color=colour, label=hook.split(",")[0])
    axes.set_xlim(left=0)
    axes.set_ylabel("loss, nats a byte")
    axes.legend(loc="upper right")
    return figure


def _in_words(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def draw() -> None:
    """Draw both figures for light and for dark pages."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    for theme in THEMES:
        with matplotlib.rc_context({**style(theme), "svg.hashsalt": "commhooks", "savefig.transparent": True}):
            for name, figure in (("speed-up", speed_up), ("loss", loss_by_time)):
                figure(measured, theme).savefig(HERE / f"{name}.{theme.name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        collect([Path(folder) for folder in sys.argv[2:]])
    draw()
