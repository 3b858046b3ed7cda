"""The command `commhooks check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commhooks.experiments.commands.options import complete_hook, json_option
from commhooks.experiments.commands.terminal import errors_in_words, write_json

if TYPE_CHECKING:
    from commhooks.testing import Finding

COLOURS = {"kept": "green", "broken": "red", "crashed": "red", "does not apply": "bright_black"}


def check(
    name: Annotated[
        str,
        typer.Argument(
            help="A compressor or a codec: package.module:Class, file.py:Class or a hook's name, each with settings "
            "after another colon.",
            show_default=False,
            autocompletion=complete_hook,
        ),
    ],
    law: Annotated[
        list[str] | None, typer.Option(help="A law to try, by the word in front of it. Repeat it. Default: all laws.")
    ] = None,
    json: Annotated[Path | None, json_option("the findings")] = None,
) -> None:
    """Try every law on a compressor."""
    with errors_in_words(json) as console:
        from commhooks.experiments.checking import compressor_named, write_findings
        from commhooks.testing import findings

        compressor = compressor_named(name)
        found: list[Finding] = []
        console.print(f"{compressor!r}\n", markup=False, highlight=False, soft_wrap=True)
        for one in findings(compressor, only=law or ()):
            found.append(one)
            typer.echo(_line(one), err=console.stderr)
        counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in COLOURS}
        seconds = sum(one.seconds for one in found)
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        console.print(f"\n{said}; {seconds:.0f} s", markup=False, highlight=False)
        if json is not None:
            write_json(lambda file: write_findings(compressor, found, file), "findings", json, console)
    if any(one.is_bad for one in found):
        raise typer.Exit(1)


def _line(one: Finding) -> str:
    """Return a finding in a line, and in more if something is wrong."""
    text = f"{typer.style(f'{one.verdict:14}', fg=COLOURS[one.verdict])} {one.law:12} {one.rule}"
    if one.verdict == "does not apply":
        return f"{text}: {one.why}"
    indented = [one.why, *([f"usual causes: {one.causes}"] if one.causes else []), *([one.place] if one.place else [])]
    return "\n".join([text, *(f"{'':28}{line}" for line in indented if line)])
