"""What must be equal on all ranks is equal, in every bit, on ranks whose processors have other kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processors import ROOT, SETTINGS, asked_for, environment_for, kernels_here
from tests.world import run_world

COMPILED = {"AVX2": "avx2", "SSE4": "sse42"}


@pytest.mark.kernels
def test_ranks_with_other_kernels_have_the_same_means_and_the_same_shared_state(tmp_path: Path) -> None:
    """Of every compressor of the table, DiLoCo and the averager; `make test-processors` takes more steps."""
    other, steps = asked_for() or "SSE4", 200 if asked_for() else 25
    variables = {*SETTINGS[other], *environment_for(other), "COMMHOOKS_COMPILED"}
    own = {name: value for name, value in os.environ.items() if name not in variables} | {"OMP_NUM_THREADS": "1"}
    ranks = list[subprocess.Popen[str]]()
    for rank, chosen in enumerate(({}, {**environment_for(other), "COMMHOOKS_COMPILED": COMPILED[other]})):
        command = [sys.executable, "-m", "tests.mixed_kernels", str(rank), str(tmp_path), str(steps)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=own | chosen, stderr=subprocess.PIPE, text=True))
    try:
        told = [one.communicate(timeout=300)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert [one.returncode for one in ranks] == [0, 0], "\n".join(told)
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("0.json", "1.json"))
    if first["kernels"] == second["kernels"]:
        pytest.skip("no variable gives a process other kernels here")
    apart = [
        f"{name}, step {step}: {what}"
        for name, of_steps in first["found"].items()
        for step, what in [first_difference(of_steps, second["found"][name])]
        if what
    ]
    assert not apart, "\n".join(apart)


def first_difference(one: list[dict[str, str]], other: list[dict[str, str]]) -> tuple[int, str]:
    """Return the first step in which something differs, and what; "": nothing does."""
    assert one and len(one) == len(other)
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine.keys() == theirs.keys()
        what = [name for name, digest in mine.items() if digest != theirs[name]]
        if what:
            return step, ", ".join(what[:3])
    return 0, ""


@pytest.mark.kernels
def test_ranks_compute_with_the_kernels_that_were_asked_for() -> None:
    """Ranks are forked from a server that has imported torch, which may have read its variables by then."""
    ours = kernels_here()
    assert run_world(kernels_here, 2, backend=None) == [ours] * 2
    asked = asked_for()
    assert asked is None or ours.aten == {"AVX2": "AVX2", "SSE4": "DEFAULT"}[asked]
