"""Defects that were found by attacking what was new, each as the smallest case that showed it."""

from __future__ import annotations

import pytest

from commhooks import AdaptiveRank, Compressor, ErrorFeedback, SettingsError, Signum, make_compressor, schedule
from tests.commhooks.workers import Workers, normal, zeros


@pytest.mark.parametrize(
    "later",
    [AdaptiveRank(rank=2, min_rank=1, max_rank=4, every=4), make_compressor("powersgd", rank=1)],
    ids=["other ranks", "powersgd"],
)
def test_ranks_are_chosen_in_a_phase_whose_state_has_other_names_than_the_next_ones(later: Compressor) -> None:
    ranks = AdaptiveRank(rank=2, min_rank=1, max_rank=6, every=4)
    sent = {}
    for compressor in (ranks, schedule((0, ranks), (100, later))):
        workers = Workers(compressor, 2, zeros((64, 64), (64, 32)))
        bytes_until = []
        for step in range(8):
            workers.step(normal(workers.parameters, 2, seed=step))
            bytes_until.append(workers.ledger.totals(workers.traffic).payload_bytes)
        sent[compressor] = bytes_until
    alone, in_phase = sent.values()
    assert in_phase == alone


@pytest.mark.parametrize(
    "growing",
    [make_compressor("qsgd", levels=1, error_feedback=True, decay=0.9), ErrorFeedback(inner=Signum(), decay=0.5)],
    ids=["qsgd", "signum"],
)
def test_a_residual_that_fades_more_slowly_than_it_grows_is_refused(growing: Compressor) -> None:
    with pytest.raises(SettingsError, match="would grow without bound"):
        growing.check_parameters({"w": zeros((64, 64))[0]})
