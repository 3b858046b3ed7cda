"""Repetitions of three comparisons at other seeds, each kept as losses and step times."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from commhooks.experiments.results.verdicts import Run
from commhooks.experiments.runs import RunResult

_OWN = "experiments/studies/verdicts/own_tasks.py"
COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "demo": (),
    "text": ("--task", f"{_OWN}:text", "--optimizer", "adamw:lr=1e-3", "--link", "200Mbit/s", "--steps", "80"),
    "points": ("--task", f"{_OWN}:points", "--optimizer", "sgd:lr=0.05,momentum=0.9", "--steps", "80"),
}
"""The options of `commhooks compare`; hooks, ranks and links are its defaults."""
BASELINE = "all-reduce"
Repetitions = Mapping[str, Mapping[str, Mapping[int, Run]]]
"""Runs by setting (task and link), hook and seed."""


def record(comparison: str, seed: int, place: Path) -> Path:
    """Make a comparison with this seed unless its file is there, and return the file."""
    path = place / f"{comparison}-{seed}.npz"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "commhooks.experiments", "compare", *COMPARISONS[comparison]]
            subprocess.run([*command, "--seed", str(seed), "--out", f"{folder}/runs", "--quiet"], check=True)
            condense(Path(folder) / "runs", path)
    return path


def condense(folder: Path, path: Path) -> None:
    """Write the losses and step times of a comparison's runs into one file."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    for result in map(RunResult.read, sorted((folder / "results").glob("*.json"))):
        settings = result.settings
        name = f"{settings.task.label.rpartition(':')[2]}, {settings.link.label}|{settings.hook.label}"
        found[f"{name}|steps"] = np.array([[step.loss, step.seconds] for step in result.steps], dtype=np.float32)
        found[f"{name}|held out"] = np.array([[one.step, one.loss] for one in result.evaluations], dtype=np.float32)
    unfinished = path.with_suffix(".part.npz")
    np.savez_compressed(unfinished, allow_pickle=False, **found)
    unfinished.replace(path)


def recorded(place: Path) -> Repetitions:
    """Return all repetitions in a folder."""
    found: defaultdict[str, defaultdict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(one for name in COMPARISONS for one in place.glob(f"{name}-*.npz")):
        with np.load(path) as data:
            for key in data.files:
                setting, hook, kind = key.split("|")
                if kind == "steps":
                    losses, seconds = data[key].T.tolist()
                    held_out = {int(step): loss for step, loss in data[f"{setting}|{hook}|held out"].tolist()}
                    found[setting][hook][int(path.stem.rpartition("-")[2])] = Run(losses, seconds, held_out)
    return found
