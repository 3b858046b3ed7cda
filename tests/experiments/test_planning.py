"""The commands probe and plan: from files to an answer, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments import predicting
from experiments.commands.cli import app
from experiments.planning.planning import Planned, hooks_to_validate, sentences, validation_table
from experiments.planning.seldom import compare_command
from experiments.planning.sharded import sharded_sentences
from experiments.planning.worlds import check_world
from experiments.predicting import Probe
from experiments.seldom import Seldom
from experiments.specs import Spec
from experiments.studies.predictions.plans import Case, summary
from tests.commhooks.test_plan import a_probe, a_profile, hook, parts
from tests.commhooks.test_sharded_steps import profiled


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return the options of a plan from files: fp16 takes 128 ms where the all-reduce takes 140."""
    a_probe().write(tmp_path / "probe.json")
    a_profile(hook("fp16", 0.113, 2)).write(tmp_path / "profile.json")
    return ["plan", "--probe", str(tmp_path / "probe.json"), "--profile", str(tmp_path / "profile.json")]


def said(arguments: list[str], code: int = 0) -> str:
    """Return what the command prints, on lines of any length."""
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


def test_a_plan_from_files_names_the_hook_and_the_line_that_attaches_it(files: list[str], tmp_path: Path) -> None:
    text = said([*files, "--json", str(tmp_path / "plan.json")])
    assert "fp16 saves 9 % of the all-reduce's step" in text
    assert 'Use it: commhooks.attach(model, "fp16")' in text
    assert "Without any communication a step would be 1.27× as fast" in text
    assert (tmp_path / "plan.json").exists()


def test_a_plan_names_its_backend(files: list[str]) -> None:
    assert "Backend: gloo. For each byte that it sends, the processor is busy for 0.00 ns, as probed." in said(files)
    assert "Backend: none. Sending is assumed to use no CPU time." in said([*files, "--backend", "none"])
    assert "plan(backend='mpi'): expected 'gloo', which was probed, or 'none'" in said([*files, "--backend", "mpi"], 2)


def test_a_plan_says_that_none_pays(files: list[str], tmp_path: Path) -> None:
    a_profile(hook("fp16", 0.150, 2)).write(tmp_path / "profile.json")
    assert "None pays: the plain all-reduce is predicted to be fastest." in said(files)


def test_a_plan_says_how_long_rounds_of_seldom_communication_must_be(files: list[str], tmp_path: Path) -> None:
    text = said(files)
    assert "Without any communication" in text
    assert "No hook of every step reaches 90.0 % compute. DiLoCo is predicted to in rounds of 2 steps: " in text
    assert 'commhooks.DiLoCo(model, optimizer, every=2, compressor="fp16")' in text
    assert "It trains differently" in text
    command = "commhooks compare --task my_task.py:task --link real --hook all-reduce --hook "
    assert f"torchrun ... --no-python {command}diloco:compressor=fp16,every=2" in text
    assert " ".join(["all-reduce, 3 fragments, delay 5", "6", "100.0 %", "666.7"]) in text


def test_the_command_that_compares_the_loss_has_the_shortest_rounds_of_each_compressor() -> None:
    """On the link and the task that were profiled; and the hooks are some that train."""
    hooks = [
        hook(name, 0.113, size) for name, size in (("powersgd:rank=4", 0.5), ("int4", 0.4), ("fp16", 2), ("int8", 1))
    ]
    profile = a_profile(*hooks, model="gpt:size=small", link="hosts:10Mbit/s")
    plan = predicting.plan(profile, a_probe(per_byte=4e-6))
    words = shlex.split(compare_command(plan, profile))
    assert " ".join(words[:8]) == "commhooks compare --task gpt:size=small --link hosts:10Mbit/s --ranks 2"
    assert words[8:10] == ["--hook", "all-reduce"]
    seldom = [Seldom.of(Spec.parse(word)) for word in words[11::2]]
    assert [one.compressor.label for one in seldom] == ["int4", "powersgd:rank=4", "int8"]
    assert [one.rounds for one in seldom] == [
        next(one.rounds for one in plan.seldom if one.compressor == name)
        for name in ("int4", "powersgd:rank=4", "int8")
    ]


def test_a_plan_says_what_fsdp2_would_take(files: list[str], tmp_path: Path) -> None:
    profiled().write(tmp_path / "profile.json")
    assert "FSDP2" not in said(files)
    assert "With FSDP2, all-reduce makes steps" in said([*files, "--sharded"]), (
        "PyTorch's sends twice as much over Gloo"
    )
    a_probe(per_byte=1e-5).write(tmp_path / "probe.json")
    text = said([*files, "--sharded"])
    assert "FSDP2: predicted steps" in text and "torch.none" in text
    assert "With FSDP2, int8 makes steps" in text and 'commhooks.attach_sharded(model, "int8")' in text
    plan = predicting.plan(profiled(), a_probe(), sharded=True)
    plain = tuple(one for one in plan.sharded if not one.code)
    (none, _) = sharded_sentences(dataclasses.replace(plan, sharded=plain))
    assert none == "With FSDP2 none of these compressors makes steps faster."


def test_a_plan_says_when_seldom_communication_brings_nothing(files: list[str], tmp_path: Path) -> None:
    a_profile(hook("fp16", 0.110, 0.1)).write(tmp_path / "profile.json")
    text = said(files)
    assert "Seldom communication (DiLoCo) is not needed: a hook of every step reaches 90.0 % compute." in text
    assert "rounds for" not in text


def test_a_plan_says_when_rounds_would_have_to_be_too_long(files: list[str], tmp_path: Path) -> None:
    a_probe(per_byte=4e-6).write(tmp_path / "probe.json")  # 16 s of sending
    a_profile(plain=parts(16.0)).write(tmp_path / "profile.json")
    text = said(files)
    assert "would not reach 90.0 % compute in rounds of up to 500 steps with any of these compressors" in text
    assert "over 500" in text and "It trains differently" not in text


@pytest.mark.parametrize(
    ("module", "function", "line", "expected"),
    [
        ("probing", "measure_probe", "probe --seconds 5", "probing the link unlimited between 2 ranks for up to 5 s"),
        ("planning", "make_plan", "plan --task gpt", "measuring gpt on 2 ranks for up to 100 s"),
        ("planning", "make_plan", "plan --task gpt --validate", "measuring gpt on 2 ranks for up to 130 s"),
        ("profiling", "measure_profile", "profile --task gpt", "measuring gpt on 2 ranks for up to 60 s"),
        (
            "overlap",
            "measure_overlap",
            "profile --task gpt --overlap --link 1Mbit/s",
            "measuring gpt on 2 ranks in 9 rounds",
        ),
    ],
)
def test_what_is_measured_and_for_how_long_is_said_first(
    module: str, function: str, line: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"experiments.planning.{module}.{function}", lambda *_: None)
    assert said(line.split()) == f"{expected} ..."
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert said(line.split()) == ""


def test_files_that_hold_something_else_are_named(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text("{}")
    assert "probe.json: expected a file of format 1" in said(files, 2)


def test_what_is_validated_is_the_best_three_and_the_all_reduce() -> None:
    hooks = [hook(name, seconds, 0.1) for name, seconds in (("a", 0.11125), ("b", 0.112), ("c", 0.113), ("d", 0.114))]
    profile, probe = a_profile(*hooks), a_probe()
    plan = predicting.plan(profile, probe)
    assert [choice.label for choice in hooks_to_validate(plan)] == ["a", "b", "c", "allreduce"]
    console = Console(record=True, width=100)
    console.print(validation_table(Planned(plan, probe, profile, {"a": [0.100, 0.1, 0.12]})))
    assert "112.0" in (text := console.export_text()) and "+12.0 %" in text
    assert sentences(Planned(plan, probe, profile))[0] == plan.reason
    disturbed = dataclasses.replace(plan, bound=0.6)
    assert "Other load disturbed the steps" in sentences(Planned(disturbed, probe, profile))[1 + plan.pays]


def test_the_accuracy_counts_errors_and_recommendations() -> None:
    cases = [
        Case("link", "task", name, predicted, 0.0, "b", (0.9 * seconds, seconds, 1.4 * seconds))
        for name, predicted, seconds in (("allreduce", 0.2, 0.2), ("b", 0.23, 0.21), ("c", 0.2, 0.4))
    ]
    found = summary(cases)
    assert found["median error"] == pytest.approx(0.23 / 0.21 - 1)
    assert found["within 15 %"] == pytest.approx(2 / 3)
    assert found["recommended within 5 % of the fastest"] == 1.0
    slower = [dataclasses.replace(case, recommended="c") for case in cases]
    assert summary(slower)["within 5 % and the spread"] == 0.0
    nearly = [cases[0], dataclasses.replace(cases[1], steps=(0.23,)), cases[2]]
    found = summary(nearly)  # 15 % slower; the all-reduce's upper quartile lies 20 % above its median
    assert (found["recommended within 5 % of the fastest"], found["within 5 % and the spread"]) == (0.0, 1.0)


def test_a_link_that_changes_in_time_cannot_be_measured() -> None:
    assert check_world(None, "1Gbit/s")[0] == 2
    with pytest.raises(ValueError, match="changes over time, so no figure holds for it"):
        check_world(2, "1Gbit/s+100Mbit/s@30s")


def test_a_probe_names_its_rows(tmp_path: Path) -> None:
    from experiments.planning.probing import probe_tables

    probe = a_probe(largest=3000)
    console = Console(record=True, width=120)
    console.print(probe_tables(Probe(ranks=4, costs=probe.costs, took=1.0, inner=probe, outer=probe))[2])
    assert "between 2 machines" in (text := console.export_text()) and "all-to-all" in text
    assert "2.93 KiB" in text and "0.03 ms" in text
    assert "MiB" not in text and "64 KiB" not in text, "no column is of a size that was not sent"


def test_a_probe_for_a_profile_has_as_many_ranks(files: list[str]) -> None:
    said_so = said(["probe", "--profile", files[-1], "--ranks", "3"], 2)
    assert "the profile is of 2 ranks, and the probe of 3: give --ranks 2" in said_so


def test_a_plan_names_the_files_that_do_not_say_over_which_link_they_were_measured(
    files: list[str], tmp_path: Path
) -> None:
    assert "The probe and the profile do not name a link" in said(files)
    dataclasses.replace(a_probe(), link="real").write(tmp_path / "probe.json")
    assert "The profile does not name a link" in said(files)
    a_profile(link="1Gbit/s").write(tmp_path / "profile.json")
    assert "of link '1Gbit/s' and the probe of 'real'; measure both over the link" in said(files, 2)


def test_files_of_versions_without_a_link_or_hosts_are_read(files: list[str], tmp_path: Path) -> None:
    for name in ("probe.json", "profile.json"):
        raw = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({key: raw[key] for key in raw.keys() - {"link", "hosts"}}))
    assert "fp16 saves 9 %" in said(files)
