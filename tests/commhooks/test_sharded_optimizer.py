"""A run whose optimizer shards its state resumes bit for bit, also with an optimizer that does not, and from one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commhooks import sharded_optimizer_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_a_sharded_optimizer_is_saved_as_it_is_now_and_resumes_sharded_or_whole(kind: str, tmp_path: Path) -> None:
    for ends, told in run_ranks(on_every_rank.resumed, 2, kind, str(tmp_path)):
        assert len(ends) == 6 and all(ends.values()), ends
        assert "optimizer: saved from Adam, now SGD" in told
