"""Each of thirty mistakes breaks a law that points at it, and the same compressors without one break none."""

from __future__ import annotations

import pytest

from commhooks import Compressor
from commhooks.testing import check
from tests.commhooks import mistaken
from tests.commhooks.mistaken import MISTAKES, RIGHT

CRASHES = {"EmptyParameter", "ZeroDimParameter", "NoBFloat16", "NotAlone"}
"""The mistakes that are errors in the author's code, of which the line is named."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_breaks_the_law_that_points_at_it(name: str) -> None:
    kind, law, said = MISTAKES[name]
    found = [one for one in check(kind(), only=() if law == "steps" else (law,)) if one.is_bad]
    assert [one.law for one in found] == [law]
    assert said in found[0].why
    crashes = name in CRASHES
    assert found[0].verdict == ("crashed" if crashes else "broken")
    assert found[0].place.startswith(f"{mistaken.__file__}:") if crashes else found[0].causes


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_without_a_mistake_no_law_is_broken(kind: type[Compressor]) -> None:
    assert [str(one) for one in check(kind()) if one.is_bad] == []


def test_there_are_thirty() -> None:
    assert len(MISTAKES) == 30
