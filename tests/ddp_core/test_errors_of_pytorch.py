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


def branches(*uses: str, **options: Any) -> Program:
    """Return a program whose forward passes use these weights, one step after another."""

    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(Branches(), **options)
        return steps(ddp, lambda step: ddp(ones(rank), uses[step]).backward(), len(uses))

    return program


def pair(first: Tensor, second: Tensor) -> list[Tensor]:
    return [first, second]


def overlapping(first: Tensor, second: Tensor) -> list[Tensor]:
    return [first, first * second]


def in_turn(retain: bool = False, overlap: bool = False, joint_at: tuple[int, ...] = (), **options: Any) -> Program:
    """Return a program with one backward pass for each output; at `joint_at`, one for both."""

    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(Outputs(overlapping if overlap else pair), **options)

        def run(step: int) -> None:
            losses = [output.square().sum() for output in ddp(ones(rank))]
            for loss in [sum(losses)] if step in joint_at else losses:
                loss.backward(retain_graph=retain)

        return steps(ddp, run)

    return program


def probed(wrap: Wrap, rank: int, **options: Any) -> Any:
    """Take another output's gradients after the reduction, and throw them away."""
    ddp = wrap(Outputs(lambda first, second: [first + second, first - second]), **options)

    def run(_: int) -> None:
        losses = [output.square().sum() for output in ddp(ones(rank))]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        ddp.zero_grad()
        sum(output.square().sum() for output in ddp(ones(rank))).backward()

    return steps(ddp, run)


def in_turn_under_no_sync(wrap: Wrap, rank: int, **options: Any) -> Any:
    """Keep the gradients of the second output on the rank, without a word, until the next reduction takes them too."""
    ddp = wrap(Outputs(pair), **options)

    def run(_: int) -> None:
        losses = [output.square().sum() for output in ddp(ones(rank))]
        losses[0].backward(retain_graph=True)
        with ddp.no_sync(), warnings.catch_warnings():
            warnings.simplefilter("error")
            losses[1].backward()
        sum(output.square().sum() for output in ddp(ones(rank))).backward()

    return steps(ddp, run)


def one_output(**options: Any) -> Program:
    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(Outputs(pair), **options)
        return steps(ddp, lambda _: ddp(ones(rank))[0].square().sum().backward())

    return program


def outside(before: bool, **options: Any) -> Program:
    """Return a program with a penalty on a weight, whose backward pass comes just before the loss's, or within it."""

    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(Branches(), **options)

        def run(_: int) -> None:
            loss, penalty = ddp(ones(rank)), (rank + 1) * ddp.module.a.weight.square().sum()
            if before:
                penalty.backward()
                loss.backward()
            else:
                (loss + penalty).backward()

        return steps(ddp, run)

    return program


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = scale()
        self.b = scale()

    def forward(self, x: Tensor) -> Any:
        x = self.b(x)
        for _ in range(2):
            x = checkpoint(self.a, x, use_reentrant=True)
        return x


def checkpointed_twice(wrap: Wrap, rank: int, **options: Any) -> Any:
    ddp = wrap(Reentrant(), **options)
    return steps(ddp, lambda _: ddp(ones(rank)).sum().backward())


def first_under_no_sync(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches(), static_graph=True)

    def run(_: int) -> None:
        with ddp.no_sync():
            ddp(ones(rank)).backward()
        ddp(ones(rank)).backward()

    return steps(ddp, run)


def declared_static_late(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches())
    steps(ddp, lambda _: ddp(ones(rank)).backward())
    ddp._set_static_graph()
    return ddp


def only_for(wrap: Wrap, rank: int, **options: Any) -> Any:
    """Compute the gradient of one weight alone."""
    ddp = wrap(Branches(), **options)
    return steps(ddp, lambda _: ddp(ones(rank)).backward(inputs=[ddp.module.a.weight]))


def with_a_history(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches())
    return steps(ddp, lambda _: ddp(ones(rank)).square().backward(create_graph=True))


def detached_views(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches(), **VIEWS)
    return steps(ddp, lambda _: [ddp(ones(rank)).backward(), ddp.module.a.weight.grad.detach_()])


def cleared_in_the_backward_pass(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches(), batched_grad_copy=True)
    later, earlier = ddp.module.a.weight, ddp.module.b.weight
    later.register_post_accumulate_grad_hook(lambda _: setattr(earlier, "grad", None))
    return steps(ddp, lambda _: ddp(ones(rank)).backward())


def frozen_once_wrapped(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches())
    ddp.module.a.requires_grad_(False)
    return steps(ddp, lambda _: ddp(ones(rank)).backward())


def replaced(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches())
    ddp.module.a = scale()
    return steps(ddp, lambda _: ddp(ones(rank)).backward())


def dense_where_a_sparse_one_was_announced(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Words())
    ddp.module.words.sparse = False
    return steps(ddp, lambda _: ddp(rank).backward())


def sparse_where_a_dense_one_was_announced(wrap: Wrap, rank: int) -> Any:
    model = Words()
    model.words.sparse = False
    ddp = wrap(model)
    model.words.sparse = True
    return steps(ddp, lambda _: ddp(rank).backward())


def early_end(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(Branches())
    with ddp.join(throw_on_early_termination=True):
        return steps(ddp, lambda _: ddp(ones(rank)).backward(), 2 + rank)


def pickled_with_a_group(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(scale(), process_group=dist.new_group())
    ddp.__getstate__()
    return ddp


def mean(_state: object, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / 2)


def hooks(*functions: Any, **options: Any) -> Program:
    def program(wrap: Wrap, rank: int) -> Any:
        ddp = wrap(Branches(), **options)
        for function in functions:
            ddp.register_comm_hook(None, function)
        return steps(ddp, lambda _: ddp(ones(rank)).backward())

    return program


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def fails(_state: object, _bucket: object) -> Any:
    raise ZeroDivisionError("of the hook")


def buffer_hook(wrap: Wrap, rank: int) -> Any:
    ddp = wrap(nn.BatchNorm1d(1))
    ddp._register_buffer_comm_hook(None, 3)
    return ddp


def extra_weight(wrap: Wrap, rank: int) -> Any:
    return wrap(nn.Sequential(*(scale() for _ in range(1 + rank))))


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
    "outputs in turn, the second under no_sync, searched for": (
        functools.partial(in_turn_under_no_sync, **SEARCH),
        EQUAL,
    ),
    "another output's gradients thrown away, searched for": (functools.partial(probed, **SEARCH), EQUAL),
    "another output's gradients thrown away, static": (functools.partial(probed, **STATIC), EQUAL),
    "an output never used": (one_output(), UNFINISHED + r"b\.weight"),
    "an output never used, searched for": (one_output(**SEARCH), EQUAL),
    "an output never used, static": (one_output(**STATIC), EQUAL),
    "a weight outside forward": (outside(before=False), EQUAL),
    "a weight outside forward, earlier": (outside(before=True), READY + r"a\.weight"),
    "a weight outside forward, earlier, static": (outside(before=True, **STATIC), EQUAL),
    "checkpointed twice": (checkpointed_twice, READY + r"a\.weight"),
    "checkpointed twice, static": (functools.partial(checkpointed_twice, **STATIC), EQUAL),
    "static: no_sync first": (first_under_no_sync, EQUAL),
    "static: declared late": (declared_static_late, "should be called before training loop starts"),
    "gradients of one weight alone": (only_for, UNFINISHED + r"b\.weight"),
    "gradients of one weight alone, static": (functools.partial(only_for, **STATIC), EQUAL),
    "gradients with a history": (with_a_history, EQUAL),
    "views detached": (detached_views, "Can't detach views in-place"),
    "a gradient cleared": (cleared_in_the_backward_pass, EQUAL),
    "frozen once wrapped": (frozen_once_wrapped, UNFINISHED + r"a\.weight"),
    "replaced": (replaced, r"not averaged: 'a\.weight' on rank \d.*added or replaced afterwards"),
    "dense for sparse": (dense_where_a_sparse_one_was_announced, r"'words\.weight': expected a sparse gradient"),
    "sparse for dense": (sparse_where_a_dense_one_was_announced, r"'words\.weight' got a sparse gradient"),
    "a rank ends early": (early_end, "exhausted (all )?inputs"),
    "pickled with a group": (pickled_with_a_group, "only supported when using DDP with the default process group"),
    "two hooks": (hooks(mean, mean), EQUAL),
    "a hook that raises": (hooks(fails), "of the hook"),
    "a hook without a future": (hooks(lambda state, bucket: 3), HOOK + "must return a torch.futures.Future"),
    "a hook's number": (hooks(lambda state, bucket: done(3)), HOOK + "got int"),
    "a hook's empty list": (hooks(lambda state, bucket: done([])), HOOK + "got list"),
    "a hook's wrong size": (hooks(lambda state, bucket: done(torch.ones(0))), HOOK + r"got shape \(0,\)"),
    "a buffer hook": (buffer_hook, r"buffer hook must be callable \(got int\)"),
    "another number of weights": (extra_weight, "DDP expects same model across all ranks"),
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
