"""The command line as a whole: mistakes end in words, and help is quick."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commhooks.experiments.commands.cli import app

ROOT = Path(__file__).parents[2]
SMALL = "compare --task digits:size=small"
SIZES = "plan --parameters 2M --compute 50ms"
ONCE = ", but takes one value: give it once."
MISTAKES = {
    "comapre": "Did you mean 'compare'",
    "cluster create demo --hosts=2 --hosts=3": f"--hosts is given 2 times{ONCE}",
    f"{SMALL} --rate '100 furlongs'": "error: rate '100 furlongs' does not parse",
    f"{SMALL} --rate 1Gbit/s,latency=1ms": "expected a rate alone, such as 100Mbit/s; write --link 1Gbit/s,latency=1ms",
    f"{SMALL} --link real": "link 'real' is the network between ranks that torchrun starts",
    f"{SMALL} --out {shlex.quote(__file__)}": "is a file; name a folder",
    f"{SMALL} --seeds 0": "seeds must be a whole number of at least 1",
    f"{SMALL} --ranks 400": "use fewer ranks",
    f"{SMALL} --sharded --ddp torch": "leave out --ddp torch",
    f"{SMALL} --go-on 0": "go_on: expected a whole number of at least 1",
    f"{SMALL} --target-loss -1": "expected a finite loss above zero",
    "check fp16 --law replica": "there is no such law; there are replicas, mean, equal,",
    "sweep nowhere/none.yaml": "commhooks sweep --example >",
    "plan": "say what is trained: --task my_task.py:task, or --parameters 25M --compute 200ms",
    "plan --parameters 2M --link 1Gbit/s": "--parameters and --compute, the time of a step without communication",
    SIZES: "--parameters needs a network: --link 200Mbit/s,latency=5ms",
    f"{SIZES} --link 1Gbit/s+1Mbit/s@3s": "changes over time, so no figure holds for it",
    f"{SIZES} --link 1Gbit/s --ranks 4,2": "expected ascending numbers from 2 on",
    f"{SIZES} --link 1Gbit/s --hook powersgd:rank=5": "its costs were not measured",
    f"{SIZES} --link 1Gbit/s --validate": "--validate takes real steps, which needs a --task",
    "plan --task gpt --ranks 2,4": "for several --ranks",
    "probe --ranks 1": "a link is measured between two ranks or more",
    "profile --task gpt --ranks 0": "ranks must be at least 1",
    "probe --json nowhere/probe.json": "cannot be written",
    "plan --profile profile.json --hook fp16": "--hook has no effect with --profile",
    "sweep --example --quiet": "--quiet has no effect with --example",
    "compare --hook diloco": "say how many steps a round has, such as diloco:every=30",
    "profile --task gpt --hook diloco:every=3": "DiLoCo averages models, not gradients",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_ends_in_words_with_2(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "300"})
    assert MISTAKES[line] in " ".join(ended.output.split())
    assert ended.exit_code == 2
    assert "Traceback" not in ended.output
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


QUICK = (
    "--help", "-h", "--version", "", "compare -h", "cluster --help", "comapre", "compare --rnaks 2",
    "compare --steps many", "profile",
)  # fmt: skip
ONE_AFTER_ANOTHER = """
import shlex, sys
from commhooks_command import main
for line in sys.argv.pop().splitlines():
    sys.argv = ["/usr/bin/commhooks", *shlex.split(line)]
    try:
        main()
    except SystemExit:
        print("imported:", *sorted({"torch", "numpy", "scipy"} & sys.modules.keys()))
"""


def test_help_the_version_and_typos_import_neither_torch_nor_numpy_nor_scipy() -> None:
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, "\n".join(QUICK)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = [line for line in ended.stdout.splitlines() if line.startswith("imported:")]
    assert dict(zip(QUICK, imported, strict=True)) == dict.fromkeys(QUICK, "imported:")


def test_hooks_and_tasks_are_listed_and_described() -> None:
    for words, expected in {
        "hooks": ("the largest elements of each parameter's gradient", "torch.powersgd"),
        "hooks int8": ("Source:", "Weakness:", "error_feedback", "server_feedback"),
        "hooks torch.powersgd": ("matrix_approximation_rank 1",),
        "hooks diloco": ("every required The number of steps in a round.", "outer auto The outer optimizer"),
        "tasks": ("digits",),
        "tasks digits": ("batch_size",),
    }.items():
        said = " ".join(CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"}).output.split())
        assert not [one for one in expected if one not in said], said


def test_the_shell_completes_names() -> None:
    for words, expected in {
        "commhooks compare --hook power": {"powersgd", "powersgd-unbiased"},
        "commhooks tasks d": {"digits"},
        "commhooks pro": {"probe", "profile"},
    }.items():
        variables = {"_COMMHOOKS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        ended = CliRunner().invoke(app, [], env=variables, prog_name="commhooks")
        assert set(ended.output.split()) == expected
