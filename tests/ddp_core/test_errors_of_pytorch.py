"""Where PyTorch's class raises, ours raises or its replicas are equal: the programs of docs/guide/ddp_core.md."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

from ddp_core import DistributedDataParallel
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import Branches, Outputs, Words, ones, scale

facts = Facts(check_exit=False)  # PyTorch's class may abort at exit

Wrap = Callable[..., Any]
Program = Callable[[Wrap, int], Any]
STATIC: dict[str, Any] = {"static_graph": True}
SEARCH: dict[str, Any] = {"find_unused_parameters": True}
VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
EQUAL = None


def steps(ddp: Any, run: Callable[[int], object], count: int = 3) -> Any:
    """Train with SGD; `run` makes the gradients of a step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(count):
        optimizer.zero_grad()
        run(step)
        optimizer.step()
    return ddp


def train(
    make: Callable[[], nn.Module] = Branches,
    run: Callable[[Any, Tensor], object] = lambda ddp, x: ddp(x).backward(),
    prepare: Callable[[Any], object] = lambda ddp: None,
    **options: Any,
) -> Program:
    """Return a program that does something to the wrapped model, and then takes steps."""

    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(make(), **options)
        prepare(ddp)
        return steps(ddp, lambda _: run(ddp, ones(rank)))

    return program


def branches(*uses: str, **options: Any) -> Program:
    """Return a program whose forward passes use these weights, one step after another."""

    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(Branches(), **options)
        return steps(ddp, lambda step: ddp(ones(rank), uses[step]).backward(), len(uses))

    return program


def losses_of(ddp: Any, x: Tensor) -> list[Any]:
    return [output.square().sum() for output in ddp(x)]


def in_turn(retain: bool = False, overlap: bool = False, joint_at: tuple[int, ...] = (), **options: Any) -> Program:
    """Return a program with one backward pass for each output; at `joint_at`, one for both."""

    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(Outputs(lambda first, second: [first, first * second if overlap else second]), **options)

        def run(step: int) -> None:
            losses = losses_of(ddp, ones(rank))
            for loss in [sum(losses)] if step in joint_at else losses:
                loss.backward(retain_graph=retain)

        return steps(ddp, run)

    return program


def pair() -> nn.Module:
    return Outputs(lambda first, second: [first, second])


def sum_and_difference() -> nn.Module:
    return Outputs(lambda first, second: [first + second, first - second])


def first_output(ddp: Any, x: Tensor) -> None:
    losses_of(ddp, x)[0].backward()


def only_of_one(ddp: Any, x: Tensor) -> None:
    ddp(x).backward(inputs=[ddp.module.a.weight])


def probe(ddp: Any, x: Tensor) -> None:
    """Take another output's gradients after the reduction, and throw them away."""
    losses = losses_of(ddp, x)
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    ddp.zero_grad()
    sum(losses_of(ddp, x)).backward()


def second_under_no_sync(ddp: Any, x: Tensor) -> None:
    """Keep the gradients of the second output on the rank, without a word, until the next reduction takes them too."""
    losses = losses_of(ddp, x)
    losses[0].backward(retain_graph=True)
    with ddp.no_sync(), warnings.catch_warnings():
        warnings.simplefilter("error")
        losses[1].backward()
    sum(losses_of(ddp, x)).backward()


def outside(ddp: Any, x: Tensor, before: bool = True) -> None:
    """Add a penalty on a weight, whose backward pass comes just before the loss's, or within it."""
    loss, penalty = ddp(x), x.item() * ddp.module.a.weight.square().sum()
    for each in (penalty, loss) if before else (loss + penalty,):
        each.backward()


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = scale()
        self.b = scale()

    def forward(self, x: Tensor) -> Any:
        x = self.b(x)
        for _ in range(2):
            x = checkpoint(self.a, x, use_reentrant=True)
        return x.sum()


def first_under_no_sync(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        ddp(x).backward()
    ddp(x).backward()


def clear_another(ddp: Any) -> None:
    """Let the later weight's gradient clear the earlier one's."""
    later, earlier = ddp.module.a.weight, ddp.module.b.weight
    later.register_post_accumulate_grad_hook(lambda _: setattr(earlier, "grad", None))


def words(announced: bool) -> Program:
    """Return a program whose embedding's gradient is sparse if it was announced to be dense, or the reverse."""

    def program(wrap: Wrap, rank: int) -> Any:
        model = Words()
        model.words.sparse = announced
        ddp = wrap(model)
        model.words.sparse = not announced
        return steps(ddp, lambda _: ddp(rank).backward())

    return program


def declared_static_late(wrap: Wrap, rank: int) -> Any:
    ddp = train()(wrap, rank)
    ddp._set_static_graph()
    return ddp


def early_end(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches())
    with ddp.join(throw_on_early_termination=True):
        return steps(ddp, lambda _: ddp(ones(rank)).backward(), 2 + rank)


def mean(_state: object, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / 2)


def hooks(*functions: Any) -> Program:
    return train(prepare=lambda ddp: [ddp.register_comm_hook(None, function) for function in functions])


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


READY = "ready only once.*name "
UNFINISHED = "finished reduction in the prior iteration.*"
CHANGED = "training graph has changed in this iteration.*"
HOOK = "communication hook '.*bucket 0.*"
# the program: what ours raises, or EQUAL replicas; what else ours raises than PyTorch's is a difference of the guide
PROGRAMS: dict[str, tuple[Program, str | None]] = {
    "a weight left out": (branches("a", "a"), UNFINISHED + r"b\.weight"),
    "the same, searched for": (branches("a", "a", **SEARCH), EQUAL),
    "the same, static": (branches("a", "a", **STATIC), EQUAL),
    "static: left out later": (branches("ab", "a", "a", **STATIC), CHANGED + r"b\.weight"),
    "static: used later": (branches("a", "ab", **STATIC), CHANGED + r"name b\.weight"),
    "outputs in turn": (in_turn(), EQUAL),
    "outputs in turn that share a weight": (in_turn(retain=True, overlap=True), READY + r"a\.weight"),
    "outputs in turn, searched for": (in_turn(retain=True, **SEARCH), READY + r"b\.weight.*add the losses up"),
    "outputs in turn later, searched for": (in_turn(retain=True, joint_at=(0,), **SEARCH), READY + r"b\.weight"),
    "outputs in turn, graph freed, searched for": (in_turn(**SEARCH), "backward through the graph a second time"),
    "outputs in turn, static": (in_turn(**STATIC), READY + r"b\.weight.*add the losses up"),
    "outputs in turn, graph retained, static": (in_turn(retain=True, **STATIC), READY + r"b\.weight"),
    "outputs in turn later, static": (in_turn(joint_at=(0,), **STATIC), EQUAL),
    "outputs in turn, the second under no_sync, searched for": (train(pair, second_under_no_sync, **SEARCH), EQUAL),
    "another output's gradients thrown away, searched for": (train(sum_and_difference, probe, **SEARCH), EQUAL),
    "another output's gradients thrown away, static": (train(sum_and_difference, probe, **STATIC), EQUAL),
    "an output never used": (train(pair, first_output), UNFINISHED + r"b\.weight"),
    "an output never used, searched for": (train(pair, first_output, **SEARCH), EQUAL),
    "an output never used, static": (train(pair, first_output, **STATIC), EQUAL),
    "a weight outside forward": (train(run=functools.partial(outside, before=False)), EQUAL),
    "a weight outside forward, earlier": (train(run=outside), READY + r"a\.weight"),
    "a weight outside forward, earlier, static": (train(run=outside, **STATIC), EQUAL),
    "checkpointed twice": (train(Reentrant), READY + r"a\.weight"),
    "checkpointed twice, static": (train(Reentrant, **STATIC), EQUAL),
    "static: no_sync first": (train(run=first_under_no_sync, **STATIC), EQUAL),
    "static: declared late": (declared_static_late, "should be called before training loop starts"),
    "gradients of one weight alone": (train(run=only_of_one), UNFINISHED + r"b\.weight"),
    "gradients of one weight alone, static": (train(run=only_of_one, **STATIC), EQUAL),
    "gradients with a history": (train(run=lambda ddp, x: ddp(x).square().backward(create_graph=True)), EQUAL),
    "views detached": (
        train(run=lambda ddp, x: [ddp(x).backward(), ddp.module.a.weight.grad.detach_()], **VIEWS),
        "Can't detach views in-place",
    ),
    "a gradient cleared": (train(prepare=clear_another, batched_grad_copy=True), EQUAL),
    "frozen once wrapped": (
        train(prepare=lambda ddp: ddp.module.a.requires_grad_(False)),
        UNFINISHED + r"a\.weight",
    ),
    "replaced": (
        train(prepare=lambda ddp: setattr(ddp.module, "a", scale())),
        r"not averaged: 'a\.weight' on rank \d.*added or replaced afterwards",
    ),
    "dense for sparse": (words(announced=True), r"'words\.weight': expected a sparse gradient"),
    "sparse for dense": (words(announced=False), r"'words\.weight' got a sparse gradient"),
    "a rank ends early": (early_end, "exhausted (all )?inputs"),
    "pickled with a group": (
        lambda wrap, rank: wrap(scale(), process_group=dist.new_group()).__getstate__(),
        "only supported when using DDP with the default process group",
    ),
    "two hooks": (hooks(mean, mean), EQUAL),
    "a hook without a future": (hooks(lambda state, bucket: 3), HOOK + "must return a torch.futures.Future"),
    "a hook's number": (hooks(lambda state, bucket: done(3)), HOOK + "got int"),
    "a hook's wrong size": (hooks(lambda state, bucket: done(torch.ones(0))), HOOK + r"got shape \(0,\)"),
    "a buffer hook": (
        lambda wrap, rank: wrap(nn.BatchNorm1d(1))._register_buffer_comm_hook(None, 3),
        r"buffer hook must be callable \(got int\)",
    ),
    "another number of weights": (
        lambda wrap, rank: wrap(nn.Sequential(*(scale() for _ in range(1 + rank)))),
        "DDP expects same model across all ranks",
    ),
}


def outcome(wrap: Wrap, program: Program, rank: int) -> tuple[str | None, bool]:
    """Run a program; return its error on the rank that has one, and whether the ranks' parameters are then equal."""
    torch.manual_seed(0)
    error, values = None, []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = [parameter.tolist() for parameter in program(wrap, rank).parameters()]
    except Exception as raised:  # of any type: PyTorch's class raises internal ones too
        error = f"{type(raised).__name__}: {raised}"
    every: list[Any] = [None, None]
    dist.all_gather_object(every, (error, values))
    return next((e for e, _ in every if e), None), every[0][1] == every[1][1]


@facts
def where_pytorchs_class_raises_ours_does_or_its_replicas_are_equal(rank: int) -> None:
    wrong = []
    for name, (program, words) in PROGRAMS.items():
        theirs, _ = outcome(nn.parallel.DistributedDataParallel, program, rank)
        ours, equal = outcome(DistributedDataParallel, program, rank)
        as_expected = equal if words is EQUAL else bool(re.search(f"(?s){words}", ours or ""))
        if not as_expected or (words is EQUAL and ours):
            wrong.append(f"{name}: expected {words}, got {ours} (equal: {equal}); PyTorch's: {theirs}")
        if theirs and not ours and not equal:
            wrong.append(f"{name}: PyTorch's raised {theirs}, ours went on with replicas that differ")
    assert not wrong, "\n".join(wrong)


test = facts.tests()
