"""Which tests run when, and in which order."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import in_any_order, reason_unknown
from tests.ddp_core.facts import Facts
from tests.tiers import covering, in_turn, refuse_processes, starts_processes, thorough
from tests.world import on_ranks, run_world


def own_rank(rank: int) -> int:
    return rank


@on_ranks(2)
def on_two_ranks(rank: int) -> None:
    own_rank(rank)


def by_hand() -> None:
    run_world(own_rank, 1)


def through_another() -> None:
    by_hand()


def by_a_command() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def by_none() -> int:
    return own_rank(len(__name__))


def item(function: Callable[..., object], *fixtures: Callable[..., object]) -> pytest.Function:
    defined = {str(number): [SimpleNamespace(func=one)] for number, one in enumerate(fixtures)}
    made: pytest.Function = SimpleNamespace(  # type: ignore[assignment]  # what of one is looked at
        function=function, _fixtureinfo=SimpleNamespace(name2fixturedefs=defined)
    )
    return made


def test_what_starts_processes_is_found_by_the_names_in_its_code_and_its_fixtures() -> None:
    for function in (on_two_ranks, by_hand, through_another, by_a_command, Facts().tests()):
        assert starts_processes(item(function)), function
    assert not starts_processes(item(by_none))
    assert starts_processes(item(by_none, by_hand))


def test_a_process_that_is_not_found_is_refused_where_there_should_be_none() -> None:
    program = f"import tests.test_tiers as here\nhere.{refuse_processes.__name__}()\nhere.{by_a_command.__name__}()"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "mark this test `processes`" in ended.stderr


def test_pairs_take_turns_and_the_rest_is_left_to_the_long_run() -> None:
    def usual(pairs: list[object]) -> list[tuple[object, ...]]:
        return [tuple(one.values) for one in pairs if isinstance(one, type(pytest.param())) and not one.marks]

    assert usual(in_turn("abc", [1, 2])) == [("a", 1), ("b", 2), ("c", 1)]
    assert usual(in_turn("ab", [1, 2], whole="b".__eq__)) == [("a", 1), ("b", 1), ("b", 2)]
    assert usual(in_turn("ab", [1, 2], fast="b".__eq__)) == [("b", 2)]
    assert usual(thorough("abc", unless="b".__eq__)) == [("b",)]


def test_a_cover_has_all_pairs_in_half_of_the_tuples_and_make_test_fast_has_its_first() -> None:
    found = covering("ab", [1, 2], [True, False], fast=1)
    chosen = [tuple(one.values) for one in found if "thorough" not in {mark.name for mark in one.marks}]
    assert len(found) == 8 and len(chosen) == 4
    assert len({pair for one in chosen for pair in itertools.combinations(enumerate(one), 2)}) == 3 * 2 * 2
    assert sum(not one.marks for one in found) == 1


def test_each_seed_has_an_order_of_test_files() -> None:
    orders = [in_any_order({f"tests/test_{n}.py" for n in range(20)}, seed) for seed in ("1", "1", "2")]
    assert orders[0] == orders[1] != orders[2] and set(orders[0]) == set(orders[2])


def test_a_skip_is_known_by_its_reason() -> None:
    assert reason_unknown("needs a CUDA device") is None
    assert reason_unknown("compiled passes: no compiler") is not None
