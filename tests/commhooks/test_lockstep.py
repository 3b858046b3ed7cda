"""Gloo is what lockstep says, on four ranks too. What each rank runs is in lockstep_in_worlds.py."""

from __future__ import annotations

import pytest

from tests import bounds
from tests.cases import BY_NAME, DDP_AND_POLICY, EVERY_FORM_OR_ALL
from tests.commhooks import lockstep_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

pytestmark = pytest.mark.kernels


@EVERY_FORM_OR_ALL
@DDP_AND_POLICY
def test_on_four_ranks_every_step_of_every_case_is_lockstep_but_for_the_order_of_summation(
    kind: str, policy: str, names: list[str]
) -> None:
    ranks = run_ranks(on_every_rank.every_case, 4, kind, policy, names, check_exit=True)
    for name, case in ((name, BY_NAME[name]) for name in names):
        compared = [rank[name] for rank in ranks]
        assert len({tuple(one.digests) for one in compared}) == (1 if case.exchanges else 4), name
        mean, state = max(one.mean for one in compared), max(one.state for one in compared)
        if case.wire is None:
            assert max(mean, state) <= bounds.IN_FLOAT64, name
        elif not case.rank:
            # A narrow wire rounds after every term, so the order of a sum shows; in no rank's own cast, which is owed.
            assert mean <= 2 * bounds.of_mean(4, case.wire) and state == 0, name
        # What a wire rounds of factors is bounded by their conditioning alone. At two ranks no order shows: test_hooks.
