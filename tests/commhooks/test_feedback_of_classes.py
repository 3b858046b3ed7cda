"""A compressor's class and its name are the same: error feedback belongs to both, unless it is left out explicitly."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from commhooks import (
    Compressor,
    ErrorFeedback,
    Exchanger,
    Hierarchical,
    PerParameter,
    StartAfter,
    WireDtype,
    WithoutFeedback,
    attach,
    make_compressor,
    schedule,
)
from commhooks.codecs import QSGD, Int8, Sign
from commhooks.compressors import COMPRESSORS, DeMo, PowerSGD, RandomK, SparseLoCo, TopK, TwoHop
from commhooks.lockstep import lockstep_connections
from commhooks.wrappers.error_feedback import with_feedback
from tests.cases import NEEDED
from tests.commhooks.models import Given, wrap
from tests.world import on_ranks


def named(text: str, **settings: object) -> Compressor:
    return make_compressor(text, **settings)  # type: ignore[arg-type]  # settings of several types


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_class_is_what_its_name_makes(name: str) -> None:
    made = make_compressor(name, **NEEDED.get(name, {}))
    own = made.inner if isinstance(made, ErrorFeedback) else made
    assert with_feedback(own) == with_feedback(made) == made and with_feedback(made) is made
    assert str(own) == str(made)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (PowerSGD(rank=4), named("powersgd", rank=4)),
        (TwoHop(codec=Sign()), named("sign")),
        (TwoHop(codec=QSGD()), TwoHop(codec=QSGD())),
        (RandomK(unbiased=True), RandomK(unbiased=True)),
        (StartAfter(inner=DeMo(), steps=3), named("demo", start_after=3)),
        (WireDtype(inner=PowerSGD(), dtype=torch.bfloat16), named("powersgd", wire="bf16")),
        (Hierarchical(inner=SparseLoCo(), size=2), Hierarchical(inner=named("sparse-loco"), size=2)),
        (
            PerParameter(rules=(("*.bias", TopK()),), otherwise=TwoHop(codec=Int8())),
            PerParameter(rules=(("*.bias", named("top-k")),), otherwise=named("int8")),
        ),
        (schedule((0, TopK()), (5, PowerSGD())), schedule((0, named("top-k")), (5, named("powersgd")))),
        (WithoutFeedback(inner=StartAfter(inner=TopK(), steps=2)),) * 2,
        (ErrorFeedback(inner=StartAfter(inner=DeMo(), steps=2), decay=0.9),) * 2,
    ],
    ids=str,
)
def test_each_compressor_inside_of_our_wrappers_has_one_feedback(given: Compressor, used: Compressor) -> None:
    (connection,) = lockstep_connections(1)
    tensors = {"one.weight": torch.zeros(20, 30), "one.bias": torch.zeros(30)}
    if not isinstance(given, Hierarchical):
        assert Exchanger(tensors, given, connection=connection).compressor == used
    assert with_feedback(given) == used
    assert make_compressor(str(given)) == used


def test_without_feedback_there_is_no_residual() -> None:
    tensors = {"weight": torch.zeros(20, 30)}
    kept = []
    for compressor in (TopK(), WithoutFeedback(inner=TopK())):
        exchanger = Exchanger(tensors, compressor, connection=lockstep_connections(1)[0])
        exchanger.average({"weight": torch.randn(20, 30)})
        kept.append(exchanger.memory().residuals)
    assert kept == [4 * 20 * 30, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(TopK):
    """A user's own class."""


@on_ranks(1)
def test_a_users_own_class_is_taken_as_it_is_with_a_warning_unless_the_loss_is_meant(rank: int) -> None:
    told = r"Own\(.* loses what it does not send of 'weights.0' .*ErrorFeedback\(inner=...\), or in WithoutFeedback"
    with pytest.warns(UserWarning, match=told):
        assert attach(wrap("core", Given((4, 5))), Own()).compressor == Own()
    for meant in (WithoutFeedback(inner=Own()), ErrorFeedback(inner=Own()), WithoutFeedback(inner=TopK())):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert attach(wrap("core", Given((4, 5))), meant).compressor == meant


def test_of_what_was_not_sent_the_decay_says_how_much_comes_back() -> None:
    compressor = ErrorFeedback(inner=TopK(ratio=0.5), decay=0.5)
    exchanger = Exchanger({"w": torch.zeros(10, 10)}, compressor, connection=lockstep_connections(1)[0])
    exchanger.average({"w": (given := torch.arange(100.0).view(10, 10)).clone()})
    exchanger.average({"w": (mean := torch.zeros(10, 10))})
    assert torch.equal(mean, torch.where(given < 50, given / 2, 0.0))
