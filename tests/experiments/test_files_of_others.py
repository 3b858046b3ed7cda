"""Files that somebody else made: what they name is not imported, nothing hangs, and a terminal shows text alone."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commhooks
from commhooks import SettingsError, load_checkpoint, save_checkpoint
from commhooks.control import Adaptive
from commhooks.errors import CommHooksError
from commhooks.experiments import planning
from commhooks.experiments.accuracy import Accuracy
from commhooks.experiments.commands.cli import app
from commhooks.experiments.planning.costs import Costs
from commhooks.experiments.planning.probes import Probe
from commhooks.experiments.planning.profiles import GradientProfile, Profile
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.sweeps.lock import LOCK, OWNER, claimed
from commhooks.experiments.sweeps.store import HEAD as FAILED
from commhooks.experiments.sweeps.store import read_failures
from commhooks.experiments.sweeps.yaml_file import read_sweep
from commhooks.making import compressor_in_file
from commhooks.saving.contents import read_contents
from commhooks.saving.rules import LoadRules
from tests.commhooks.mirrored import given
from tests.commhooks.test_plan import a_probe, a_profile, hook
from tests.commhooks.told import told_by
from tests.experiments.synthetic import result
from tests.tiers import in_turn
from tests.world import on_ranks

MODULE = "planted_by_a_file"
TRAP = """
import dataclasses
from pathlib import Path
from commhooks.compressors import TopK

Path(__file__).with_name("imported").touch()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trap(TopK):
    pass


@dataclasses.dataclass(frozen=True)
class Made:
    def __post_init__(self):
        Path(__file__).with_name("made").touch()


@dataclasses.dataclass(frozen=True)
class Rule:
    base: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ruled(TopK):
    rule: Rule = Rule()
"""
NAMES = [f"{MODULE}:Trap", f"error-feedback:inner=({MODULE}:Trap)", f"error-feedback:inner='{MODULE}:Trap'"]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a module on the path that writes a file when it is imported, and return its folder."""
    (tmp_path / f"{MODULE}.py").write_text(TRAP)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop(MODULE, None)


def plan_of(name: str, folder: Path) -> object:
    """Plan from a profile of a hook and a probe that were read back."""
    gradients = tuple(GradientProfile(one, (64, 64), 4 * 64 * 64, 0.1) for one in "abcd")
    a_profile(hook(name, 0.112, 0.1), gradients=gradients).write(folder / "profile.json")
    a_probe().write(folder / "probe.json")
    return planning.plan(Profile.read(folder / "profile.json"), Probe.read(folder / "probe.json"), sharded=True)


@pytest.mark.parametrize("name", [*NAMES, f"{MODULE}:Made"])
def test_a_class_that_a_file_names_is_not_imported(name: str, planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=rf"'{MODULE}:\w+'.*from a file.*not imported.*import {MODULE}"):
        plan_of(name, planted)
    assert not (planted / "imported").exists()
    monkeypatch.setitem(sys.modules, MODULE, None)  # as a program bars it
    with pytest.raises(SettingsError, match=rf"'{MODULE}:\w+'.*from a file.*not imported"):
        compressor_in_file(name)


def test_of_what_the_program_has_imported_only_a_compressor_and_its_settings_are_made(planted: Path) -> None:
    module = importlib.import_module(MODULE)
    for name in NAMES:
        plan_of(name, planted)
    ruled = module.Ruled(rule=module.Rule(base=0.25))
    assert compressor_in_file(str(ruled)) == ruled
    for name in (f"{MODULE}:Made", f"{MODULE}:Ruled:rule=({MODULE}:Made)"):
        with pytest.raises(SettingsError, match=f"'{MODULE}:Made'.*from a file.*is not a dataclass"):
            plan_of(name, planted)
    assert not (planted / "made").exists()


def test_of_accuracies_and_probes_texts_are_compared(planted: Path) -> None:
    found, probe = Accuracy.read(), a_probe()
    task = found.tasks[0]
    named = tuple(dataclasses.replace(task.differences[0], compressor=name) for name in NAMES)
    more = dataclasses.replace(task, differences=(*named, *task.differences))
    dataclasses.replace(found, tasks=(more,)).write(planted / "accuracy.json")
    read = Accuracy.read(planted / "accuracy.json")
    assert read.costs_of("fp16") == found.costs_of("fp16")[:1] != ()
    costs = {**probe.costs, NAMES[0]: probe.costs["all-reduce"]}
    dataclasses.replace(probe, costs=costs, link=NAMES[0]).write(planted / "probe.json")
    planning.plan(a_profile(hook("fp16", 0.12, 1)), Probe.read(planted / "probe.json"))
    assert not (planted / "imported").exists()


def manifest(path: Path) -> object:
    checkpoint = path.parent / "checkpoint-00001-step-1"
    checkpoint.mkdir(exist_ok=True)
    path.rename(checkpoint / "manifest.json")
    return read_contents(checkpoint, 0, 1, LoadRules())


def failure(path: Path) -> object:
    (path.parent / "failures").mkdir(exist_ok=True)
    (path.parent / "failures" / "run.txt").write_text(f"{FAILED}{path.read_text()}\n")
    return read_failures([path.parent])


def folder_in_use(path: Path) -> object:
    """Take a folder while another process, whose lock is damaged, has it."""
    lock = path.with_name(LOCK)
    lock.write_text(OWNER + path.read_text()[:985])
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with claimed(path.parent):
            raise AssertionError("it was free")


READERS: list[Callable[[Path], object]] = [
    Profile.read,
    Probe.read,
    Costs.read,
    Accuracy.read,
    RunResult.read,
    read_sweep,
    manifest,
    failure,
    folder_in_use,
]


NESTED = ["[" * 10_000, '{"a":' * 10_000, "[" * 2000 + "]" * 2000]


@pytest.mark.parametrize(
    ("read", "text"),
    in_turn(READERS, NESTED),
    ids=[f"{read.__qualname__}-{how}" for read in READERS for how in ("lists", "objects", "closed")],
)
def test_a_file_of_nested_brackets_is_refused_in_words(
    read: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises((CommHooksError, ValueError), match="nested too deeply|expected|is in use|was saved in format"):
        read(path)


NUMBERS = [1e308, 1e31, -1e308, float("inf"), float("nan"), 10**400, -(10**400)]


@pytest.mark.parametrize("name", ["hop_seconds", "round_seconds", "copy_rate"])
def test_a_number_that_nothing_has_is_refused_and_nothing_hangs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    Costs.read().write(file)
    costs = json.loads(file.read_text())
    for number in NUMBERS:
        file.write_text(json.dumps(costs | {name: number}))
        with pytest.raises(ValueError, match=f"costs {file}: .*expected a number of at most 1e\\+30 in size"):
            Costs.read(file)


@pytest.mark.parametrize("text", ["a:b=(" * 10_000, "a(b=" * 10_000 + ")" * 10_000])
def test_a_text_of_nested_brackets_is_refused_in_words(text: str) -> None:
    with pytest.raises(SettingsError, match="does not parse: its brackets are nested too deeply"):
        commhooks.make_compressor(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        RunSettings.from_dict({"task": "gpt", "hook": text})


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[link=http://x]here[/link][/b]"


@pytest.mark.usefixtures("pictures_are_not_rendered")
def test_results_are_reported_as_text_and_without_an_import(planted: Path) -> None:
    own = f"{planted / MODULE}.py:task"
    for name, task in (("all-reduce", f"{ESCAPES}.py:task"), ("all-reduce", own), (NAMES[0], own), (NAMES[1], own)):
        run = result(name, task=task, steps=12)
        (layer, *layers), *probes = run.probes[0].layers, *run.probes[1:]
        first = dataclasses.replace(run.probes[0], layers=(dataclasses.replace(layer, name=ESCAPES), *layers))
        machine = {**run.machine, "processor": ESCAPES, "load": 9.0}
        dataclasses.replace(run, probes=(first, *probes), description=ESCAPES, machine=machine).write(planted)
    printed = CliRunner().invoke(app, ["report", str(planted), "--out", str(planted / "out")]).output
    assert [one for one in printed if one != "\n" and (ord(one) < 32 or 127 <= ord(one) < 160)] == []
    assert "\u202e" not in printed
    assert "[link=http://x]here[/link]" in "".join(printed.split())
    assert (planted / "out" / "report.html").exists() and not (planted / "imported").exists()


@on_ranks(2, check_exit=False)
def test_a_checkpoint_imports_nothing_that_it_names(rank: int, tmp_path: Path) -> None:
    (tmp_path / f"{MODULE}.py").write_text(TRAP)
    sys.path.insert(0, str(tmp_path))
    model = given("core")
    hooks = commhooks.attach(model, "all-reduce")
    controller = Adaptive(hooks, ["all-reduce", "fp16"])
    named = {**controller.state_dict(), "candidates": [NAMES[0], NAMES[2]]}
    state = hooks.state_dict()
    state["settings"] = dict.fromkeys(state["settings"], NAMES[0])
    extra = {"adaptive": named, "hooks": state}
    save_checkpoint(tmp_path / "run", step=1, model=model, hooks=hooks, extra=extra)
    read = load_checkpoint(tmp_path / "run", model=model, hooks=hooks)
    assert read is not None
    for load, part in ((controller.load_state_dict, "adaptive"), (hooks.load_state_dict, "hooks")):
        told = told_by(lambda load=load, part=part: load(read.extra[part]))  # type: ignore[misc]
        assert told.error == "CheckpointError" and f"{MODULE}:Trap" in told.text
    assert not (tmp_path / "imported").exists()
