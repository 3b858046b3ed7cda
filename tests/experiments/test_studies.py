"""The studies' command line: mistakes end in words, before anything is measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.studies.app import app

PLANS = "plans --task digits:size=tiny"
MISTAKES = {
    "benhc": "No such command 'benhc'",
    "bench policices": "did you mean 'policies'",
    "bench policies --results nowhere/bench.json": "cannot be written",
    "bench hook": "did you mean 'hooks'?",
    "bench --quick --check benchmarks.json": "not comparable",
    "bench --render": "name it with --results",
    "gpu-cost --device cpu --model GPT": "model 'GPT' is not known",
    "gpu-cost --device tpu": "device 'tpu'",
    "gpu-cost --device cpu no-such-hook": "no-such-hook",
    "reproduce powersgd-rnak": "did you mean 'powersgd-rank'",
    "reproduce powersgd-rank --size huge": "size 'huge' is not known",
    "estimates --world 1": "give it with --measure",
    "estimates --measure --world 99": "world 99: expected a number from 0 to",
    "estimates --measure --world -1": "world -1: expected a number from 0 to",
    "estimates --folder .": "measure the steps with --measure",
    "estimates --folder nowhere --measure": "cannot be written",
    "plans --task digts": "did you mean 'digits'",
    "plans --kept damaged.json": "damaged.json: expected cases of format 1",
    "plans --kept nowhere.json": "nowhere.json: expected cases of format 1",
    f"{PLANS} --json nowhere/cases.json": "cannot be written",
    f"{PLANS} --repeat 0": "repeat must be at least 1",
    f"{PLANS} --seconds 0": "a profile takes a time above zero",
    f"{PLANS} --probe-seconds 0": "a probe takes 1 to 120 seconds",
    f"{PLANS} --link real": "start it with torchrun",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_ends_in_words_with_2(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.json").write_text("{")
    ended = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "300"})
    assert MISTAKES[line] in " ".join(ended.output.split())
    assert ended.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.json"], "nothing is left behind"
