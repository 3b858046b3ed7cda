"""The virtual device finds mistakes: each scenario is right as it is, and every mutant of it is found."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from types import ModuleType

import pytest

import commhooks
from tests.virtual_device import scenarios, training
from tests.virtual_device.mutants import MUTANTS, NUMBER, RACE, WAIT, Mutant, NotAppliedError, put_in
from tests.virtual_device.scenarios import SCENARIOS, Scenario
from tests.virtual_device.worlds import Seen, see

pytestmark = pytest.mark.virtual_device

RUNS = ("late", "random:1")
IN_ORDER = "eager"


@functools.cache
def _as_it_is(scenario: Scenario) -> Seen:
    """Return what a scenario computes in order, after it has been found right in every schedule."""
    expected = see(scenario.program, IN_ORDER)
    assert expected.values
    idle = [file for file in scenario.waits_in if not any(f"/{file}:" in wait.place for wait in expected.waits)]
    assert not idle, f"the host no longer waits in {', '.join(idle)}, and need not be permitted to"
    for run in (IN_ORDER, *RUNS, "random:2"):
        seen = expected if run == IN_ORDER else see(scenario.program, run)
        assert not seen.error, run
        assert found_in(seen, expected, scenario) == set(), (run, seen.races, seen.waits)
    return expected


def found_in(seen: Seen, expected: Seen, scenario: Scenario) -> set[str]:
    """Return what is wrong with a run."""
    waits = [wait for wait in seen.waits if not any(f"/{file}:" in wait.place for file in scenario.waits_in)]
    is_wrong = not seen.error and not seen.equals(expected)
    return {how for how, found in ((RACE, seen.races), (NUMBER, is_wrong), (WAIT, waits)) if found}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_is_right_as_it_is(scenario: Scenario) -> None:
    assert _as_it_is(scenario).kernels > 100


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    expected = _as_it_is(mutant.scenario)
    for run in RUNS:
        with put_in(mutant):
            found = found_in(see(mutant.scenario.program, run), expected, mutant.scenario)
        if run != "late":  # numbers depend on the schedule, and only late repeats exactly in every process
            found = found - {NUMBER} | {NUMBER} & set(mutant.by)
        assert found == set(mutant.by), run


def test_a_mutant_that_no_longer_applies_fails() -> None:
    def mutant(place: str) -> Mutant:
        return Mutant("of nothing", place, lambda there: there, scenarios.PLAIN, ())

    unused = "'of nothing' no longer applies: commhooks.devices:use_own_stream was not called"
    with pytest.raises(NotAppliedError, match=unused), put_in(mutant("commhooks.devices:use_own_stream")):
        see(scenarios.PLAIN.program, "late")
    with pytest.raises(AttributeError, match="follow"), put_in(mutant("commhooks.devices:SideStream.follow")):
        pass
    with pytest.raises(ModuleNotFoundError), put_in(mutant("commhooks.streams:follow")):
        pass


def _modules() -> list[ModuleType]:
    """Return the modules of commhooks, but those that need frameworks, or are programs, and the compiled library."""
    names = [found.name for found in pkgutil.walk_packages(commhooks.__path__, "commhooks.")]
    return [
        importlib.import_module(name) for name in names if not re.search(r"\.(integrations|__main__|_kernels)\b", name)
    ]


@pytest.mark.parametrize("name", ["wait_for_copies", "keep_until_read", "mark_of"])
def test_every_module_that_waits_has_a_mutant(name: str) -> None:
    replaced = {mutant.place for mutant in MUTANTS} | training.UNORDERED.keys()
    waiting = {f"{module.__name__}:{name}" for module in _modules() if hasattr(module, name)}
    waiting.discard(f"commhooks.devices:{name}")
    assert waiting
    assert waiting <= replaced
