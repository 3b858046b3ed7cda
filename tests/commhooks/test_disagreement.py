"""Ranks with different settings all get an error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import ErrorFeedback, PerParameter, SettingsError, make_compressor
from commhooks.communicators.disagreement import describe, refusal_as_fingerprint
from commhooks.compressors import PowerSGD, TopK
from commhooks.scheduling.policy import PolicyName
from tests import bounds
from tests.commhooks.inline_on_cpu import as_on_nccl
from tests.commhooks.mirrored import SHAPES, TINY_BUCKETS, backward, largest_error
from tests.commhooks.models import Given, wrap
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import largest, normal, zeros
from tests.ddp_core.facts import BOTH_DDPS, Facts

facts, facts_of_three = Facts(kinds=BOTH_DDPS), Facts(world_size=3, kinds=BOTH_DDPS)
OTHERS, ONE = "(ranks 0, 2)", "(rank 1)"
WEIGHT = "shape (40, 30), torch.float32"
DIFFERENCES = {
    "compressor": f"compressor.dtype: torch.float16 {OTHERS}, torch.bfloat16 {ONE}.",
    "rank": f"compressor.inner.rank: 1 {OTHERS}, 2 {ONE}.",
    "seed": f"compressor.inner.seed: 0 {OTHERS}, 1 {ONE}.",
    "policy": f"policy: 'fifo' {OTHERS}, 'fused' {ONE}.",
    "version": f"commhooks: {commhooks.__version__} {OTHERS}, 0.0.9 {ONE}.",
    "name": f"parameter weights.2: {WEIGHT} {OTHERS}, missing {ONE}; parameter head: missing {OTHERS}, {WEIGHT} {ONE}.",
    "frozen": f"parameter weights.2: {WEIGHT} {OTHERS}, {WEIGHT}, frozen {ONE}.",
    "shape": f"parameter weights.2: {WEIGHT} {OTHERS}, shape (30, 40), torch.float32 {ONE}.",
    "dtype": f"parameter weights.2: {WEIGHT} {OTHERS}, shape (40, 30), torch.float64 {ONE}.",
}
"""By what differs: all that the error says of it, on 3 ranks."""


class Renamed(Given):
    """Call the parameters something else."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("weights.2", "head"), parameter


@contextlib.contextmanager
def frozen(parameter: Tensor) -> Iterator[None]:
    """Freeze a parameter."""
    parameter.requires_grad_(False)
    yield
    parameter.requires_grad_(True)


@contextlib.contextmanager
def with_data(parameter: Tensor, data: Tensor) -> Iterator[None]:
    """Put other data into a parameter, as `model.module.double()` or a transposition does after wrapping.

    Neither DDP can train afterwards, whatever is put back.
    """
    own, parameter.data = parameter.data, data
    yield
    parameter.data = own


ODD = 1
"""The rank that differs, in what rank 0 and the others have."""
ATTACHED: dict[str, tuple[tuple[str, PolicyName], tuple[str, PolicyName]]] = {
    "compressor": (("fp16", "fifo"), ("bf16", "fifo")),
    "rank": (("powersgd:rank=1", "fifo"), ("powersgd:rank=2", "fifo")),
    "seed": (("powersgd:rank=1", "fused"), ("powersgd:rank=1,seed=1", "fused")),
    "policy": (("powersgd:rank=1", "fifo"), ("powersgd:rank=1", "fused")),
}


@facts_of_three
def attaching_what_differs_on_one_rank_is_refused_on_every_rank_and_can_be_made_good(rank: int, kind: str) -> None:
    odd = rank == ODD
    module = (Renamed if odd else Given)(*SHAPES)
    model = wrap(kind, module, **TINY_BUCKETS)
    told = {"name": told_by(lambda: commhooks.attach(model, "fp16"))}
    module.named_parameters = functools.partial(nn.Module.named_parameters, module)  # type: ignore[method-assign]
    for what, ours in ATTACHED.items():
        name, policy = ours[odd]
        attach = functools.partial(commhooks.attach, model, name, policy=policy)
        told[what] = told_by(attach)
    with mock.patch("commhooks.engine.engine.VERSION", "0.0.9" if odd else commhooks.__version__):
        told["version"] = told_by(functools.partial(commhooks.attach, model, "int8"))
    spoilt = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
    weight, other = (list(one.parameters())[2] for one in (model, spoilt))
    changes: dict[str, tuple[nn.Module, Any]] = {
        "frozen": (model, frozen(weight)),
        "shape": (spoilt, with_data(other, other.data.t())),
        "dtype": (spoilt, with_data(other, other.data.double())),
    }
    for what, (changed, change) in changes.items():
        with change if odd else contextlib.nullcontext():
            told[what] = told_by(functools.partial(commhooks.attach, changed, "fp16"))
    attachment = commhooks.attach(model, "all-reduce")
    for step in range(3):
        gradients = normal(zeros(*SHAPES), dist.get_world_size(), seed=step)
        expected = [torch.stack(of_ranks).double().mean(0) for of_ranks in zip(*gradients, strict=True)]
        rounding = bounds.of_mean(len(gradients), torch.float32) * largest(*(g for own in gradients for g in own))
        assert largest_error(backward(model, gradients[rank]), expected) <= rounding
    assert attachment.steps == 3
    attachment.close()
    assert told.keys() == DIFFERENCES.keys()
    for what, difference in DIFFERENCES.items():
        check(told[what], difference)
        assert told[what].error == "AttachError"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Particular(PowerSGD):
    """Have the same settings on every rank, and refuse the model on one of them."""

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        if dist.get_rank() == ODD:
            raise SettingsError("Particular: 'head.*' is missing on this rank.")


@facts
def a_setting_that_fits_no_parameter_and_only_one_rank_has_is_an_error_on_every_rank(rank: int, kind: str) -> None:
    """Make it good. Attach also as on NCCL, where the group's own collectives carry what ranks agree on."""
    model = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
    compressor = make_compressor("powersgd", rank=2, skip=("head.*",) if rank == ODD else ())
    gradients = normal(zeros(*SHAPES), 2, seed=0)
    attempts = [told_by(lambda: commhooks.attach(model, compressor))]
    with as_on_nccl():
        attempts.append(told_by(lambda: commhooks.attach(model, ErrorFeedback(inner=Particular(rank=2)))))
    attachment = commhooks.attach(model, "all-reduce")
    attempts.append(told_by(lambda: attachment.replace(compressor)))
    for told in attempts:
        assert told.error == ("SettingsError" if rank == ODD else "AttachError")
        assert "'head.*'" in told.text and (rank == ODD or "rank 1 cannot take part: " in told.text)
    assert attachment.compressor == make_compressor("all-reduce")
    expected = [(a + b) / 2 for a, b in zip(*gradients, strict=True)]
    assert largest_error(backward(model, gradients[rank]), expected) == 0  # halves lose no bit, at any time
    attachment.close()


POWERSGD = commhooks.powerSGD_hook
BARE: dict[str, tuple[dict[str, Any], Any, str]] = {
    "seed": ({"random_seed": 7}, POWERSGD, f"compressor.inner.inner.seed: 0 {OTHERS}, 7 {ONE}."),
    "policy": ({"policy": "fused"}, POWERSGD, DIFFERENCES["policy"]),
    "wire": ({}, commhooks.fp16_compress_wrapper(POWERSGD), f"compressor: StartAfter {OTHERS}, WireDtype {ONE}."),
}
"""What one rank has in place of a state without settings and PowerSGD's hook, and what is said of it."""


@facts_of_three
def a_bare_state_of_powersgd_that_differs_on_one_rank_is_an_error_of_every_ranks_backward_pass(
    rank: int, kind: str
) -> None:
    for settings, odd_hook, difference in BARE.values():
        model = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
        state = commhooks.PowerSGDState(None, **(settings if rank == ODD else {}))
        model.register_comm_hook(state, odd_hook if rank == ODD else POWERSGD)  # type: ignore[operator]  # 'Tensor not callable'
        gradients = normal(zeros(*SHAPES), dist.get_world_size(), seed=0)[rank]
        step = functools.partial(backward, model, gradients)
        first, second = told_by(step), told_by(step)
        for told in (first, second):
            check(told, difference)
            assert f"rank {rank}" in told.text
        assert kind == "torch" or first.error == "AttachError"  # PyTorch's reducer knows RuntimeError only


def check(told: Told, difference: str) -> None:
    """Assert that the error says which ranks have what, and nothing that is the same on all."""
    assert f"ranks disagree. {difference}" in told.text, told


test_on_two_ranks, test_on_three_ranks = facts.tests(), facts_of_three.tests()


def fingerprint(compressor: commhooks.Compressor, parameters: str = "ab") -> str:
    return "\n".join([f"compressor: {compressor!r}", *(f"parameter {name}: shape (2,)" for name in parameters)])


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([fingerprint(PowerSGD(rank=2)), fingerprint(TopK())], "compressor: PowerSGD (rank 0), TopK (rank 1)."),
        (
            [fingerprint(ErrorFeedback(inner=TopK(ratio=r), decay=r)) for r in (0.5, 0.5, 0.25)],
            "compressor.inner.ratio: 0.5 (ranks 0, 1), 0.25 (rank 2); "
            "compressor.decay: 0.5 (ranks 0, 1), 0.25 (rank 2).",
        ),
        (
            [fingerprint(PerParameter(rules=(("x.*", TopK()),) * n)) for n in (1, 2)],
            "compressor.rules: length 1 (rank 0), length 2 (rank 1).",
        ),
        (["f: A(of=[B(c=1)])", "f: A(of=[B(c=2)])"], "f.of.0.c: 1 (rank 0), 2 (rank 1)."),
        (
            [fingerprint(TopK(), "ab"), fingerprint(TopK(), "ba")],
            "the order, which first differs at parameter a (rank 0), parameter b (rank 1).",
        ),
        (["step: 1"] + ["step: 2"] * 12, "step: 1 (rank 0), 2 (ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more)."),
        (
            ["step: 1", refusal_as_fingerprint(ValueError("no place:\nnone")) + "\nstep: 1"],
            "rank 1 cannot take part: no place: none.",
        ),
    ],
)
def test_only_what_differs_is_told(ranks: list[str], told: str) -> None:
    assert describe(ranks) == told
