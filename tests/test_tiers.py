"""Which tests run when, and in which order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tiers import refuse_processes


def by_a_command() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_a_process_that_is_not_found_is_refused_where_there_should_be_none() -> None:
    program = f"import tests.test_tiers as here\nhere.{refuse_processes.__name__}()\nhere.{by_a_command.__name__}()"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "mark this test `processes`" in ended.stderr
