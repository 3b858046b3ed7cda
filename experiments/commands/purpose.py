"""What the command `commhooks` is for: its commands in a sentence each, and the versions that it consists of."""

from __future__ import annotations

import platform

import torch

import commhooks

PURPOSE = "Train models over several ranks under several gradient-compression hooks, and see what each one costs."
COMMANDS = {
    "compare": "Train one model under several hooks, and write a table, plots and a report.",
    "run": "Train one model under one hook, and print the results.",
    "sweep": "Make all the runs of a YAML file or of a preset; what is finished already is not run again.",
    "report": "Write tables and the report again from the results in folders, without training.",
    "overlap": "Measure how much of the communication hides behind the backward pass.",
    "leaderboard": "Train two small tasks under every compressor, and rank them by accuracy, bytes and compute.",
    "estimate": "Estimate in a second whether compression pays: step time, speed-up and break-even rate of each hook.",
    "simulate": "Compute step time and utilisation for 2 to 1,024 ranks from what is measured on this machine.",
    "profile": "Measure where the time of a training step goes, and what every hook adds to it without a link.",
    "probe": "Measure what every collective costs between the ranks, in half a minute.",
    "plan": "Predict every hook's step on your link, and recommend one, or say that none pays.",
    "cluster": "Make a slow cluster on this machine: hosts in network namespaces, links with a real rate.",
}


def version() -> str:
    """Return the versions that a bug report should state: those of commhooks, torch and Python."""
    return f"commhooks {commhooks.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
