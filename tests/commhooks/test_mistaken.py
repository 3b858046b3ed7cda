"""Each of thirty mistakes breaks a law that points at it, and the same compressors without one break none."""

from __future__ import annotations

import pytest

from commhooks import Compressor
from commhooks.testing import check
from tests.commhooks import mistaken
from tests.commhooks.mistaken import MISTAKES, RIGHT

SAID = {
    "SumForMean": ("mean", "the mean is 2 times that of what ranks sent"),
    "ScaledTwice": ("mean", "the mean is 0.5 times that of what ranks sent"),
    "HalfDropped": ("mean", "480 of the mean's 960 elements are 0, and should not be"),
    "Clips": ("mean", "of gradients of 1e+30, the mean is off"),
    "SwallowsNaN": ("flaws", "all means are finite on rank 0, with inf on rank 1"),
    "OddElement": ("mean", "1 of the mean's 135 elements are 0, and should not be"),
    "FirstBucketOnly": ("mean", "the mean is 1, 0 times what ranks 0, 1 sent"),
    "EmptyParameter": ("steps", "RuntimeError: cannot reshape tensor of 0 elements"),
    "ZeroDimParameter": ("steps", "TypeError: len() of a 0-d tensor in step 0 on 2 workers, with float32"),
    "NoBFloat16": ("shapes", "TypeError: Got unsupported ScalarType BFloat16"),
    "Item": ("waits", "M.abs().amax().item() != 0"),
    "WrongBytes": ("bytes", "no byte is counted as sent"),
    "UnequalCollectives": ("steps", "rank 0 asked for all-reduce (1,) torch.float32, rank 1 for all-reduce (960,)"),
    "SumInHalf": ("equal", "the mean of up to 20,000 is not finite"),
    "WrongDim": ("conservation", "the mean is off by 2 of its largest element"),
    "MeanOfMeans": ("conservation", "the mean is 0.25, 0.25, 0.5 times what ranks 0, 1, 2 sent"),
    "OwnFirst": ("replicas", "ranks 0 and 1 have different means"),
    "SumInAnswer": ("conservation", "the mean is 0.33, 0, 0 times what ranks 0, 1, 2 sent"),
    "NotAlone": ("steps", "not enough values to unpack (expected at least 2, got 1) in step 0 on 1 worker"),
    "NoResidual": ("conservation", "no residual is kept"),
    "WrongSign": ("conservation", "the residual is -1 times what was not sent"),
    "ResidualOfShare": ("conservation", "the residual is 0.33 times what was not sent"),
    "RandomByRank": ("replicas", "ranks 0 and 1 have different means"),
    "ByIndex": ("buckets", "the means differ"),
    "GlobalSeed": ("repeats", "the global random generator of PyTorch was used or seeded"),
    "ShapeByRank": ("steps", "rank 0 asked for all-reduce (596,) torch.float32, rank 1 for all-reduce (585,)"),
    "BeforeTheVerdict": ("flaws", "the step after one with inf on rank 1 is another than without it"),
    "InItsClass": ("repeats", "two runs have different means"),
    "ColdAfterLoading": ("resume", "after a resume"),
    "SharesMemory": ("place", "what is remembered is another"),
}  # fmt: skip
"""The law that each mistake breaks, and what is said of it."""
CRASHES = {"EmptyParameter", "ZeroDimParameter", "NoBFloat16", "NotAlone"}
"""The mistakes that are errors in the author's code, of which the line is named."""


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_breaks_the_law_that_points_at_it(kind: type[Compressor]) -> None:
    law, said = SAID[kind.__name__]
    found = [one for one in check(kind(), only=() if law == "steps" else (law,)) if one.is_bad]
    assert [one.law for one in found] == [law]
    assert said in found[0].why
    crashes = kind.__name__ in CRASHES
    assert found[0].verdict == ("crashed" if crashes else "broken")
    assert found[0].place.startswith(f"{mistaken.__file__}:") if crashes else found[0].causes


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_without_a_mistake_no_law_is_broken(kind: type[Compressor]) -> None:
    assert [str(one) for one in check(kind()) if one.is_bad] == []


def test_there_are_thirty() -> None:
    assert len({kind.__name__ for kind in MISTAKES}) == 30 and SAID.keys() == {kind.__name__ for kind in MISTAKES}
