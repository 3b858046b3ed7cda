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
    "compare digits": "Got unexpected extra argument",
    "compare --hook": "Option '--hook' requires an argument",
    "compare --ranks two": "Invalid value for '--ranks'",
    "cluster create demo --hosts=2 --hosts=3": f"--hosts is given 2 times{ONCE}",
    f"{SMALL} --rate '100 furlongs'": "error: rate '100 furlongs' does not parse",
    f"{SMALL} --hook powersgd:rnak=4": "Did you mean 'rank'",
    f"{SMALL} --link real": "link 'real' is the network between ranks that torchrun starts",
    f"{SMALL} --task digts": "did you mean 'digits'",
    f"{SMALL} --out {shlex.quote(__file__)}": "is a file; name a folder",
    f"{SMALL} --seeds 0": "seeds must be a whole number of at least 1",
    f"{SMALL} --ranks 400": "use fewer ranks",
    f"{SMALL} --sharded --ddp torch": "leave out --ddp torch",
    f"{SMALL} --go-on 0": "go_on: expected a whole number of at least 1",
    f"{SMALL} --baseline fp61": "did you mean 'fp16'?; it must be one of the hooks",
    f"{SMALL} --target-loss -1": "expected a finite loss above zero",
    "check top-q": "Did you mean 'top-k'",
    "check nowhere.py:Class": "there is no file nowhere.py",
    "check fp16 --law replica": "there is no such law; there are replicas, mean, equal,",
    "sweep": "name a YAML file",
    "report": "Missing argument 'folders'",
    "report nowhere": "holds no results",
    "sweep nowhere/none.yaml": "commhooks sweep --example >",
    "sweep --exmaple": "--example",
    "plan": "say what is trained: --task my_task.py:task, or --parameters 25M --compute 200ms",
    "plan --parameters 2M --link 1Gbit/s": "--parameters and --compute, the time of a step without communication",
    SIZES: "--parameters needs a network: --link 200Mbit/s,latency=5ms",
    f"{SIZES} --link 1Gbit/s+1Mbit/s@3s": "changes over time, so no figure holds for it",
    f"{SIZES} --link 1Gbit/s --task gpt": "leave out the others",
    f"{SIZES} --link 1Gbit/s --ranks 4,2": "expected ascending numbers from 2 on",
    f"{SIZES} --link 1Gbit/s --hook powersgd:rank=5": "its costs were not measured",
    f"{SIZES} --link 1Gbit/s --validate": "--validate takes real steps, which needs a --task",
    "plan --task gpt --ranks 2,4": "for several --ranks",
    "plan --task gpt --probe probe.json": "probe.json: expected a file of format 1",
    "probe --ranks 1": "a link is measured between two ranks or more",
    "profile --task gpt --ranks 0": "ranks must be at least 1",
    "probe --json nowhere/probe.json": "cannot be written",
    "profile": "Missing option '--task'",
    "plan --profile profile.json --hook fp16": "--hook has no effect with --profile",
    "sweep --example --quiet": "--quiet has no effect with --example",
    "hooks powersdg": "Did you mean 'powersgd'",
    "compare --hook diloco": "say how many steps a round has, such as diloco:every=30",
    "profile --task gpt --hook diloco:every=3": "DiLoCo averages models, not gradients",
    "cluster create": "Missing argument 'name'",
    "cluster set-rate demo 1Mbit/s --direction left": "is not one of 'up', 'down', 'both'",
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
    listed = CliRunner().invoke(app, ["hooks"], env={"COLUMNS": "200"}).output
    assert "top-k" in listed and "the largest elements of each parameter's gradient" in listed
    assert "torch.powersgd" in listed
    card = " ".join(CliRunner().invoke(app, ["hooks", "int8"], env={"COLUMNS": "200"}).output.split())
    assert "Source:" in card and "Weakness:" in card
    assert "error_feedback" in card and "server_feedback" in card
    assert "matrix_approximation_rank 1" in " ".join(
        CliRunner().invoke(app, ["hooks", "torch.powersgd"]).output.split()
    )
    seldom = " ".join(CliRunner().invoke(app, ["hooks", "diloco"], env={"COLUMNS": "200"}).output.split())
    assert "every required The number of steps in a round." in seldom and "outer auto The outer optimizer" in seldom
    assert "digits" in CliRunner().invoke(app, ["tasks"]).output
    assert "batch_size" in CliRunner().invoke(app, ["tasks", "digits"]).output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("commhooks compare --hook power", {"powersgd", "powersgd-unbiased"}),
        ("commhooks tasks d", {"digits"}),
        ("commhooks pro", {"probe", "profile"}),
    ],
)
def test_the_shell_completes_names(words: str, expected: set[str]) -> None:
    variables = {"_COMMHOOKS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ended = CliRunner().invoke(app, [], env=variables, prog_name="commhooks")
    assert set(ended.output.split()) == expected
