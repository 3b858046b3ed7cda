"""The commands plan and probe: from numbers and files to an answer, and what each sentence depends on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commhooks.experiments.commands.cli import app
from commhooks.experiments.planning.request import numbers_in
from tests.commhooks.test_plan import a_probe, a_profile, hook
from tests.commhooks.test_sharded_steps import profiled

SIZES = ("plan", "--parameters", "1.4M", "--compute", "40ms")
LINK = ("--link", "200Mbit/s,latency=5ms")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return the options of a plan from files: fp16 takes 128 ms where the all-reduce takes 140."""
    a_probe().write(tmp_path / "probe.json")
    a_profile(hook("fp16", 0.113, 2)).write(tmp_path / "profile.json")
    return ["plan", "--probe", str(tmp_path / "probe.json"), "--profile", str(tmp_path / "profile.json")]


def said(*arguments: str, code: int = 0) -> str:
    """Return what the command prints, on lines of any length."""
    found = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


def test_numbers_alone_give_accuracy_beside_speed_and_the_safest_gain_with_its_line(tmp_path: Path) -> None:
    text = said(*SIZES, *LINK, "--json", str(tmp_path / "plan.json"))
    found = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    rows = {one["label"]: one for one in found["choices"]}
    assert max(cost["mean"] for cost in rows["top-k:ratio=0.01"]["costs"]) > 0.5
    advised = found["advice"]["hook"]
    assert f"Use {advised}: its steps are" in text and "its accuracy was no worse" in text
    assert f"In Python: {rows[advised]['code']}" in text
    assert "not measured" in text, "of powersgd:rank=2"
    assert all(one["speed_up"] <= found["bound"] for one in rows.values())
    assert "no hook can save more" in text and "Nothing was measured" in text
    assert "assumed" not in text, "the latency was given"


@pytest.mark.parametrize("rate", ["1Mbit/s", "25Gbit/s"])
def test_at_a_rate_at_which_nothing_was_checked_nothing_is_recommended(rate: str) -> None:
    text = said(*SIZES, "--link", f"{rate},latency=50us", "--hook", "fp16")
    assert "Not checked" in text and "Measure: torchrun" in text
    assert "Use " not in text and "None pays" not in text and "no hook can save more" not in text


def test_ranks_are_columns_and_the_advice_says_from_how_many_on() -> None:
    text = said(*SIZES, *LINK, "--ranks", "2..8", "--hook", "fp16", "--hook", "int8")
    assert "steps by number of ranks hook 2 4 8" in text
    assert "From 2 ranks on: " in text and "extrapolated" not in text
    assert "those on more are extrapolated" in said(*SIZES, *LINK, "--ranks", "16", "--hook", "fp16")
    assert (numbers_in("2..1024")[-2:], numbers_in("2..6"), numbers_in("4")) == ((512, 1024), (2, 4, 6), (4,))


def test_diloco_stands_in_the_same_table_with_its_cost_and_rounds_of_one_step_are_not_advised(tmp_path: Path) -> None:
    slow = ("--link", "10Mbit/s,latency=50ms", "--json", str(tmp_path / "plan.json"))
    text = said(*SIZES, *slow, "--hook", "diloco:every=30,compressor=int4", "--hook", "diloco:every=1")
    found = json.loads((tmp_path / "plan.json").read_text())["plans"][0]["choices"]
    assert found[0]["label"] == "diloco:compressor=int4,every=30"
    assert "in rounds of 30" in found[0]["costs"][0]["unit"]
    assert "DiLoCo(model, optimizer, every=30" in found[0]["code"]
    assert "diloco:every=1: its" not in text


def test_a_plan_from_files_names_the_hook_and_the_line_that_attaches_it(files: list[str]) -> None:
    text = said(*files)
    assert "Use fp16: its steps are 1.09 times as fast" in text
    assert 'commhooks.attach(model, "fp16")' in text
    assert "steps would be 1.27× as fast as with all-reduce" in text
    assert "The plain all-reduce is predicted 0.0 %" in text
    other = said("plan", "--profile", files[-1], "--link", "100Mbit/s,latency=0")
    assert "The plain all-reduce" not in other, "it was measured over another link"


def test_a_plan_says_what_fsdp2_would_take(files: list[str], tmp_path: Path) -> None:
    profiled().write(tmp_path / "profile.json")
    a_probe(per_byte=1e-5).write(tmp_path / "probe.json")
    assert "torch.none" not in said(*files)
    text = said(*files, "--sharded")
    assert "sharded by FSDP2" in text and "torch.none" in text and "powersgd" not in text
    assert "computed, not measured: commhooks compare --sharded" in text


def test_a_task_is_measured_on_two_ranks_and_validated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With real ranks, an emulated link, and real steps: what is asked of them comes back in one file."""
    monkeypatch.setattr("commhooks.experiments.planning.request.REAL_SECONDS", 0.5)
    words = ("--task", "gpt:size=tiny", "--link", "100Mbit/s,latency=0.1ms", "--hook", "fp16", "--seconds", "3")
    text = said("plan", *words, "--ranks", "2", "--validate", "--json", str(tmp_path / "plan.json"))
    raw = json.loads((tmp_path / "plan.json").read_text())
    assert set(raw["measured"]) == {"noop", "allreduce", "fp16"}
    assert raw["plans"][0]["plain_error"] is not None and raw["probe"] is None
    assert "real steps, in turns" in text and "all-reduce" in text
