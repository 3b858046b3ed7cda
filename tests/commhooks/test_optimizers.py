"""Compressors and optimizers on a linear regression: which pairs diverge, which setting helps, and who says so."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from commhooks import Compressor, make_compressor, schedule
from commhooks.exchange.optimizers import unsuited
from commhooks.exchange.watching import Watch
from tests.commhooks.workers import Workers, zeros
from tests.tiers import A_ROW, rows

RANKS, BATCH, ROWS, COLUMNS, STEPS = 2, 32, 8, 64, 100
SIGNS = ("demo(sign=True)", "distro", "signum")
UNSUITED = {
    "random-k": ["random-k(ratio=0.1)", "random-k(decay=0.9)", "random-k(error_feedback=False)"],
    "random-block": ["random-block(ratio=0.1)", "random-block(decay=0.9)"],
    "random-k(unbiased=True)": ["random-k(unbiased=True, ratio=0.1)"],
    "powersgd-unbiased": ["powersgd-unbiased(rank=8)", "powersgd"],
    "dgc": ["dgc(momentum=0.0, ratio=0.01)"],
    "demo(sign=True)": [],
    "distro": [],
    "signum": [],
}
"""The compressors that diverge with momentum 0.9, and the settings with which they do not."""
WITHOUT_MOMENTUM = {text: text for text in UNSUITED} | {"dgc": "dgc(ratio=0.01)"}
"""What converges with an optimizer without momentum."""


def sgd(parameters: list[Tensor], text: str = "", momentum: float = 0.9) -> Optimizer:
    """Return SGD with a learning rate that suits all-reduce, and signs."""
    return torch.optim.SGD(parameters, lr=0.1 if text in SIGNS else 0.01, momentum=momentum)


def last_loss(compressor: Compressor, text: str = "", momentum: float = 0.9) -> float:
    """Return the mean loss of the last ten steps of a linear regression, in units of the first step's."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(ROWS, COLUMNS, generator=generator)
    weight = torch.zeros(ROWS, COLUMNS, requires_grad=True)
    optimizer = sgd([weight], text, momentum)
    workers, losses = Workers(compressor, RANKS, zeros((ROWS, COLUMNS))), []
    for _ in range(STEPS):
        inputs = torch.randn(RANKS, BATCH, COLUMNS, generator=generator)
        wrong = inputs @ (weight.detach() - truth).t()
        losses.append(float(wrong.square().mean()))
        if not math.isfinite(losses[-1]):
            return math.inf
        weight.grad = workers.step([[own] for own in wrong.mT @ inputs / BATCH])[0][0]
        optimizer.step()
    return sum(losses[-10:]) / 10 / losses[0]


def test_all_reduce_converges_in_the_regression() -> None:
    assert max(last_loss(make_compressor("all-reduce"), text) for text in ("", *SIGNS)) < 0.1


@pytest.mark.parametrize("text", rows(UNSUITED, unless="demo(sign=True)".__eq__))
def test_what_is_warned_of_diverges_and_converges_with_each_setting_that_the_warning_names(text: str) -> None:
    diverged = last_loss(make_compressor(text), text)
    calm = {"no momentum": last_loss(make_compressor(WITHOUT_MOMENTUM[text]), text, momentum=0)}
    calm |= {setting: last_loss(make_compressor(setting), text) for setting in UNSUITED[text]}
    print(f"{text}: {diverged:.2g}; " + ", ".join(f"{setting}: {loss:.2g}" for setting, loss in calm.items()))
    assert max(calm.values()) < 1 < diverged


@pytest.mark.parametrize("text", UNSUITED)
def test_a_warning_names_compressor_optimizer_and_setting_and_goes_once_one_is_followed(text: str) -> None:
    parameters = zeros((ROWS, COLUMNS), (ROWS,))
    compressor = make_compressor(text)
    for nested in (compressor, schedule((0, make_compressor("all-reduce")), (5, compressor))):
        reason = unsuited(nested, sgd(parameters), parameters)
        assert reason is not None and str(nested) in reason and "SGD" in reason and "a momentum of 0" in reason
    assert unsuited(compressor, sgd(parameters, momentum=0), parameters) is None
    assert unsuited(compressor, Adam(parameters), parameters) is None
    for setting in UNSUITED[text]:
        assert unsuited(make_compressor(setting), sgd(parameters), parameters) is None


SUITED = ["all-reduce", "powersgd", "top-k", "sign", "int4", "qsgd", "sparse-loco", "demo"]


@pytest.mark.parametrize("text", rows(SUITED, unless=lambda text: text in ("all-reduce", "top-k")))
def test_nothing_is_said_of_compressors_that_converge_with_momentum(text: str) -> None:
    parameters = zeros((ROWS, COLUMNS))
    assert last_loss(make_compressor(text)) < 1
    assert unsuited(make_compressor(text), sgd(parameters), parameters) is None


@A_ROW
def test_signs_with_feedback_have_equal_second_moments_so_adams_steps_are_as_unequal_as_the_gradients() -> None:
    """Without feedback all elements of a block take equal steps, as dense Adam's; only with it the mean is right."""
    gradient = torch.tensor([1.0] * 512 + [1 / 8] * 512)
    for feedback in (True, False):
        workers = Workers(make_compressor("sign", error_feedback=feedback), RANKS, zeros((1024,)))
        first = torch.zeros(1024)
        second = torch.zeros(1024)
        for _ in range(200):
            mean = workers.step([[gradient]] * RANKS)[0][0]
            first += mean / 200
            second += mean.square() / 200
        large, small = (first / second.sqrt()).split(512)
        if feedback:
            torch.testing.assert_close(first, gradient, rtol=0.2, atol=0)
        assert float(large.mean() / small.mean()) == pytest.approx(8 if feedback else 1, rel=0.2)


def test_the_first_step_of_a_watched_optimizer_warns_once_and_on_rank_0() -> None:
    parameters = zeros((ROWS, COLUMNS))
    engines = Workers(make_compressor("dgc"), RANKS, parameters).engines
    heard = []
    for engine in engines:
        optimizer = sgd(parameters)
        watch = Watch(optimizer, None, set(parameters), engine)
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            heard.append([str(one.message) for one in caught])
        watch.remove()
    assert [len(messages) for messages in heard] == [1, 0, 0, 0]
    assert heard[0][0].startswith("commhooks: dgc with SGD: momentum is applied twice")


def test_signs_with_feedback_are_warned_of_where_an_optimizer_has_second_moments() -> None:
    parameters = zeros((ROWS, COLUMNS))
    for optimizer in (Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta):
        reason = unsuited(make_compressor("sign"), optimizer(parameters), parameters)
        assert reason is not None and reason.endswith("Set error_feedback=False.")
    assert unsuited(make_compressor("sign", error_feedback=False), Adam(parameters), parameters) is None
    assert unsuited(make_compressor("int8"), Adam(parameters), parameters) is None
