"""Edges of settings, names and wrappers: each is the smallest case that once gave a wrong answer or none."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from commhooks import (
    Compressor,
    ErrorFeedback,
    PerParameter,
    SettingsError,
    StartAfter,
    make_compressor,
    making,
    schedule,
)
from commhooks.compressors import AdaptiveRank, Affine, DeMo, PowerSGD, SparseLoCo, TopK
from commhooks.wrappers.error_feedback import with_feedback
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


def test_a_text_calls_no_function_and_no_class_but_compressors(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.touch()
    for called in (f"os:remove(path={str(trace)!r})", f"subprocess:Popen(args=('rm', {str(trace)!r}))"):
        for text in (called, f"ErrorFeedback(inner={called})"):
            with pytest.raises(SettingsError, match="is not a dataclass|does not parse"):
                make_compressor(text)
    assert trace.exists()


def test_quotes_inside_of_a_text_are_read_back() -> None:
    skipping = PowerSGD(skip=("it's", "a\"b-c'd", "x\\y-z"))
    assert make_compressor(str(skipping)) == with_feedback(skipping)


def _made_without_types(ratio):  # type: ignore[no-untyped-def]  # as other packages have them
    return TopK(ratio=ratio)


def test_a_setting_without_a_type_takes_any_value(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", f"{__name__}:_made_without_types", making.ENTRY_POINTS)
    monkeypatch.setattr(making, "entry_points", lambda group: [point])
    assert make_compressor("theirs", ratio=0.5) == ErrorFeedback(inner=TopK(ratio=0.5))


@pytest.mark.parametrize("elements", [2, 1_000, 200_000])
def test_eight_bits_lose_no_more_than_they_say_and_never_all(elements: int) -> None:
    """Half a step each is the worst for all but the largest, of 127.5 steps."""
    values = torch.full((elements,), 0.5)
    values[0], values[1] = 127.5, -127.5
    workers = Workers(make_compressor("affine", error_feedback=True), 1, [values])
    claimed = Affine().loss("w", values).error
    workers.step([[values]])
    lost = float(workers.residual(0, 0).double().square().sum() / values.double().square().sum())
    assert lost <= claimed < 1
    workers.compressor.check({"w": values}, 1)


def test_what_is_right_on_average_says_so_inside_of_wrappers_too() -> None:
    qsgd = make_compressor("qsgd", levels=7)
    for compressor in (
        make_compressor("random-k", unbiased=True),
        make_compressor("powersgd-unbiased"),
        StartAfter(inner=qsgd, steps=3),
        PerParameter(rules=(("head.*", qsgd),)),
    ):
        loss = compressor.loss("head.weight", zeros((64, 64))[0])
        assert loss is not None and loss.unbiased
    loss = make_compressor("random-k", error_feedback=False).loss("head.weight", zeros((64, 64))[0])
    assert loss is not None and not loss.unbiased


@pytest.mark.parametrize("build", [DeMo, SparseLoCo])
def test_a_mean_is_over_ranks_or_senders(build: Callable[..., Compressor]) -> None:
    assert "mean_over" not in str(build())  # so files that lack the setting mean the default
    assert make_compressor(str(build(mean_over="senders"))) == with_feedback(build(mean_over="senders"))
