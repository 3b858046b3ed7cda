"""The entry point of the command `commhooks`, which needs only what `pip install commhooks` installs."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys

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
    "reproduce": "Run an experiment of the DDP paper, of PowerSGD or of others again, and compare the results.",
    "estimate": "Estimate in a second whether compression pays: step time, speed-up and break-even rate of each hook.",
    "simulate": "Compute step time and utilisation for 2 to 1,024 ranks from what is measured on this machine.",
    "profile": "Measure where the time of a training step goes, and what every hook adds to it without a link.",
    "probe": "Measure what every collective costs between the ranks, in half a minute.",
    "plan": "Predict every hook's step on your link, and recommend one, or say that none pays.",
    "cluster": "Make a slow cluster on this machine: hosts in network namespaces, links with a real rate.",
}
INSTALL = "pip install 'commhooks[experiments]'"
NEEDED = {
    "typer": "typer",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "jinja2": "jinja2",
    "pandas": "pandas",
    "yaml": "pyyaml",
}
"""What the extra `experiments` installs: each module, and the package that has it."""


def main() -> None:
    """Run the command line; if packages that it needs are missing, say what to install and exit with 2."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        _explain(missing)
    else:
        from .commands.cli import app

        app()


def version() -> str:
    """Return the versions that a bug report should state: those of commhooks, torch and Python."""
    return f"commhooks {commhooks.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def _explain(missing: list[str]) -> None:
    """Answer --help and --version; for every command, print one sentence and exit with 2."""
    width = max(map(len, COMMANDS)) + 2
    parser = argparse.ArgumentParser(
        "commhooks",
        description=PURPOSE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:{width}}{summary}" for name, summary in COMMANDS.items()),
                "",
                f"Each of them needs {', '.join(missing)}, not installed here: {INSTALL}",
            ]
        ),
    )
    parser.add_argument("--version", action="version", version=version())
    # Optional, so that `commhooks` alone prints the help, as it does if everything is installed.
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    words = sys.argv[1:]
    # Options after the command are not parsed here: `commhooks compare --help` also reports what is missing.
    end = next((n for n, word in enumerate(words, start=1) if word in COMMANDS), None)
    command = parser.parse_args(words[:end]).command
    if command is None:
        parser.print_help()
        raise SystemExit(2)
    parser.exit(2, f"commhooks {command} needs {', '.join(missing)}, not installed here: {INSTALL}\n")
