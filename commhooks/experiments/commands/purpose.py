"""The purpose of the command `commhooks`, its commands with a sentence each, and its versions."""

from __future__ import annotations

import platform

import commhooks

PURPOSE = "Train models over several ranks under several gradient-compression hooks, and see what each one costs."
GROUPS = {
    "Decide": {
        "plan": "Predict every hook's step on your link, beside its cost in accuracy, and recommend one or none.",
    },
    "Compare": {
        "compare": "Train one model under several hooks, and write a table, plots and a report.",
        "sweep": "Train all the runs of a YAML file; finished ones are not run again.",
        "report": "Write tables and the report again from the results in folders, without training.",
    },
    "Look inside": {
        "profile": "Measure where the time of a training step goes, and what every hook adds besides its transfers.",
        "probe": "Measure the time of every collective between the ranks, in half a minute.",
        "check": "Try the laws of compressors on one of your own, and name what breaks them.",
    },
    "Look up": {
        "hooks": "List the hooks, or show one's settings and description: source, idea, bytes and weakness.",
        "tasks": "List the tasks, or show one's settings.",
        "env": "Print what an issue report needs: versions, backends, processors, compiled passes.",
    },
    "Lab": {
        "cluster": "Make a slow cluster on this machine: hosts in network namespaces, links with a real rate.",
    },
}
"""The commands in groups by purpose, each with a summary."""
COMMANDS = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}


def version() -> str:
    """Return the versions of commhooks, torch and Python, which a bug report should state."""
    from importlib import metadata  # as slow as all else that help needs

    return f"commhooks {commhooks.__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}"
