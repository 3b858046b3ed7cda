"""The entry point of the command `commhooks`, which needs only what `pip install commhooks` installs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from typing import NoReturn

from .needs import EXTRAS, extra_of, missing, not_installed
from .purpose import COMMANDS, GROUPS, PURPOSE, version


def main() -> None:
    """Run the command line; if it lacks the packages that it needs itself, say what to install and exit with 2."""
    if sys.argv[1:2] == ["reproduce"]:  # for one release
        _say_where_it_is(sys.argv[2:])
    if missing("cli"):
        _explain()
    else:
        from .cli import app

        # torch.optim would otherwise make a folder here when it is imported, and leave it behind.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
        app()


def _say_where_it_is(words: list[str]) -> NoReturn:
    """Name the command that `commhooks reproduce` has become, with the same arguments, and exit with 2."""
    command = shlex.join(["python", "-m", "experiments.studies", "reproduce", *words])
    sys.stderr.write(f"commhooks reproduce is a study now, and is not installed: in a checkout, run\n\n    {command}\n")
    raise SystemExit(2)


def _explain() -> None:
    """Answer --help and --version; for every command, print one sentence and exit with 2."""
    width = max(map(len, COMMANDS)) + 2
    lines: list[str] = []
    for group, commands in GROUPS.items():
        lines += [f"{group.lower()}:", *(f"  {name:{width}}{summary}" for name, summary in commands.items())]
    for extra in EXTRAS:
        commands_with_it = [name for name in COMMANDS if extra_of(name) == extra]
        lines += ["", f"{', '.join(commands_with_it)} need {not_installed(extra)}"]
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
    parser.exit(2, f"commhooks {command} needs {not_installed(extra_of(command))}\n")
