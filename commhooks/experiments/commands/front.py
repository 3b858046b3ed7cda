"""The entry point of the command `commhooks`, which needs only packages that commhooks installs without an extra."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from commhooks.experiments.commands.needs import WITHOUT_EXTRA, missing, not_installed
from commhooks.experiments.commands.purpose import COMMANDS, GROUPS, PURPOSE, version


def main() -> None:
    """Run the command line; if it lacks the packages that it needs itself, say what to install and exit with 2."""
    # torch.optim would otherwise make a folder here when it is imported, and leave it behind.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    if not {"typer", "rich"} & set(missing()):
        from commhooks.experiments.commands.cli import app

        app()
    elif sys.argv[1:2] == [WITHOUT_EXTRA]:
        _print_environment(sys.argv[2:])
    else:
        _explain()


def _print_environment(words: list[str]) -> None:
    """Run `commhooks env`, as commands/env.py does if Typer is installed, and exit with 0, or 1 if it fails."""
    from commhooks.experiments.environment import print_environment

    parser = argparse.ArgumentParser(f"commhooks {WITHOUT_EXTRA}", description=COMMANDS[WITHOUT_EXTRA])
    parser.add_argument("--json", type=Path, help="write the same into this file; -: to standard output")
    try:
        print_environment(parser.parse_args(words).json)
    except OSError as error:
        parser.exit(1, f"error: {error}\n")
    parser.exit(0)


def _explain() -> None:
    """Answer --help and --version; for every command, print one sentence and exit with 2."""
    width = max(map(len, COMMANDS)) + 2
    lines: list[str] = []
    for group, commands in GROUPS.items():
        lines += [f"{group.lower()}:", *(f"  {name:{width}}{summary}" for name, summary in commands.items())]
    lines += ["", f"All but {WITHOUT_EXTRA} need {not_installed()}"]
    parser = argparse.ArgumentParser(
        "commhooks",
        description=PURPOSE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(lines),
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
    parser.exit(2, f"commhooks {command} needs {not_installed()}\n")
