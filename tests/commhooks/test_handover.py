"""One state of PowerSGD and several models, one after the other. See handover_in_worlds.py."""

from __future__ import annotations

import pytest

from tests.commhooks import handover_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])


@both_ddps
def test_a_state_begins_anew_with_the_next_model(kind: str) -> None:
    run_ranks(on_every_rank.model_after_model, 2, kind)


def test_mistakes_with_one_state_are_still_named() -> None:
    for told in run_ranks(on_every_rank.mistakes, 2, check_exit=False):
        assert "cannot change to (None, 'whole-bucket'); use one hook with one state" in told["hook"]
        assert "bind was called with one, and gradients of the other came; make one state for each" in told["bound"]
        assert "the earlier one is used again; make one state for each model" in told["again"]
        assert "both have gradients in one backward pass; make one state for each model" in told["at once"]
