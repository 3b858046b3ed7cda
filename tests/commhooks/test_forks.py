"""A process that is forked while a compressor is attached, as a data loader or a subprocess may do it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.world.launcher import ROOT


def test_a_forked_process_ends_as_it_wants_to_and_does_not_train_with_its_parent_s_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.commhooks.forking", str(tmp_path / "store")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = dict(line.partition(": ")[::2] for line in run.stdout.splitlines())
    assert told.get("trains and drops") == told.get("in mid-step") == "7", run.stdout + run.stderr
    assert "rank 0, step 3, bucket 0" in told["told"] and "this process was forked" in told["told"]
    assert "the parent trained on" in told, run.stdout + run.stderr
