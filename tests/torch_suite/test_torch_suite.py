"""Our class passes what PyTorch's class passes of PyTorch's own tests, but for those excluded by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.torch_suite.exclusions import EXCLUDED
from tests.world.launcher import ROOT

# 10 to 20 s each, then 4 s; those excluded run, in vain, with both classes. The whole suite has all of them.
SLOW = ("test_ddp_compile_static_graph", "test_ddp_uneven_inputs$", "test_ddp_apply_optim_in_backward$")
LEFT_TO_THE_WHOLE = "|".join([*SLOW, *(f"{name}$" for name in EXCLUDED)])


def run_suite(*options: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.torch_suite", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.torch_suite
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "named", ["test_ddp_[a-h]", "test_ddp_[i-z]", "(?!test_ddp_)"]
)  # so that each takes under a minute
def test_what_pytorchs_class_passes_ours_passes(named: str) -> None:
    run_suite("--class", "quick", "--jobs", "2", "-k", f"^(?!{LEFT_TO_THE_WHOLE}){named}")


@pytest.mark.torch_suite
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", ["2", "3", "4"])
def test_the_whole_suite_side_by_side(world_size: str) -> None:
    run_suite("--class", "both", "--world-size", world_size)
