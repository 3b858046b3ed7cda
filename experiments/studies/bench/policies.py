"""The cost of packing: steps of one rank under the policies "fused" and "fifo", in turns.

A process group of one rank moves nothing, so what remains is compressing, packing, and the hand-over of buckets.
"""

from __future__ import annotations

import functools
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.launch import Tell
from commhooks.experiments.report.words import seconds_in_words
from commhooks.experiments.specs import Spec
from commhooks.scheduling.policy import PolicyName
from experiments.studies.bench.given import forward_and_backward
from experiments.studies.bench.rows import AGAIN, OURS, THEIRS, Row, Seconds, beside
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import in_turns

SENTENCE = (
    "The CPU time of a backward pass with 40 buckets (178 MB) on a single rank, under the policy `fused` over "
    "that under `fifo`: what it costs to pack the requests of all buckets into one message. Noise is `fifo` against "
    "itself."
)
TARGET = 3.0
HOOKS = ("all-reduce", "powersgd:rank=4")
BUCKETS = 40
ROWS, COLUMNS = 1088, 1024  # of the matrix in each bucket; a vector of as many elements as it has rows comes with it
BUCKET_MIB = 4.25
POLICIES: dict[str, PolicyName] = {"fifo": "fifo", "fused": "fused", "again": "fifo"}


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each hook."""
    tell("policies: fused and fifo in turns")
    found = on_ranks(partial(_take_turns, quick), 1, tell)
    return [_row(name, seconds) for name, seconds in found.items()]


def _row(name: str, seconds: Seconds) -> Row:
    turns = {OURS: seconds["fused"], THEIRS: seconds["fifo"], AGAIN: seconds["again"]}
    return beside("fifo", name, "fused over fifo", turns, seconds_in_words, target=TARGET)


def _take_turns(quick: bool, tell: Tell) -> dict[str, Seconds]:
    torch.manual_seed(0)
    buckets, rows, rounds = (3, 16, 2) if quick else (BUCKETS, ROWS, 20)
    given = [torch.randn(shape) for _ in range(buckets) for shape in ((rows, COLUMNS), (rows,))]
    found = {}
    for text in HOOKS:
        contenders = {}
        for name, policy in POLICIES.items():
            model = DistributedDataParallel(_HandsIn(given), bucket_cap_mb=BUCKET_MIB * rows / ROWS)
            commhooks.attach(model, make_hook(Spec.parse(text)), policy=policy)
            contenders[name] = partial(forward_and_backward, model)
        found[text] = in_turns(contenders, rounds, warm_up=4, clock=time.process_time)
    return found


class _HandsIn(nn.Module):
    """Parameters whose gradients are given, at the price of one copy of each."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient)) for gradient in given])

    def forward(self) -> Tensor:
        zeros = [_submit(weight, gradient) for weight, gradient in zip(self.weights, self.given, strict=True)]
        return torch.stack(zeros).sum()


class _Submit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


_submit: Any = functools.partial(_Submit.apply)
