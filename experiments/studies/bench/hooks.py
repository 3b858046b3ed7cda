"""Our communication hooks against those of the same names in PyTorch, under both DDPs.

PyTorch's DDP reads a hook's annotations, which must be types: no `from __future__ import annotations` here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock
from torch.futures import Future

import commhooks
from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings, Wire
from commhooks.experiments.links.linked_group import LinkedGroup
from commhooks.experiments.report.words import seconds_in_words
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.units import bytes_in_words
from experiments.studies.bench.given import (
    GPT_SHAPES,
    GivenBucket,
    Shape,
    forward_and_backward,
    refill,
    resnet18_shapes,
)
from experiments.studies.bench.memory import KEEPS_FREED, growth_in_turns, is_countable, return_freed_memory
from experiments.studies.bench.rows import AGAIN, OURS, THEIRS, Row, Seconds, beside, pooled
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import in_turns

SENTENCE = (
    "Each of our hooks over PyTorch's of the same name, under `ddp_core` and under PyTorch's DDP on 2 ranks of one "
    "thread each: forward and backward pass; the memory that the model, its DDP and 4 steps take at most; collectives "
    "and payload bytes of a step, which are exact; and the CPU time of a call of the hook on a single rank, "
    "where collectives move nothing. Noise is PyTorch's hook against itself, under another copy of the model. "
    "PyTorch's `powerSGD_hook` fails on Gloo if there are two buckets, so all PowerSGD runs have one. Its "
    "`batched_powerSGD_hook` fails in the first compressed step, so ours is compared with its `powerSGD_hook`. "
    "PyTorch's DDP accepts its `bf16_compress_hook` on Gloo only under another name."
)
RANKS = 2
DDPS = {"core": "ddp_core", "torch": "PyTorch's DDP"}
_COUNTED_STEPS, _STEPS_BEFORE = 2, 4  # buckets are rebuilt in the second step, PowerSGD begins in the third


def bf16_under_another_name(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Run PyTorch's hook."""
    return default_hooks.bf16_compress_hook(group, bucket)


@dataclass(frozen=True, kw_only=True)
class Twin:
    """One of our hooks, PyTorch's counterpart, and the targets of their ratio."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    step_target: float | None = None
    compute_target: float | None = None
    rank: int | None = None  # PowerSGD's; None: the hook's state is a process group
    form: tuple[tuple[str, Any], ...] = ()  # settings of ours that PyTorch's does not have

    def hook(self, who: str, group: Any = None) -> tuple[Any, Callable[..., Any]]:
        """Return a new state, and the hook."""
        if self.rank is None:
            return group, self.ours if who == OURS else self.theirs
        kind: Any = commhooks.PowerSGDState if who == OURS else stock.PowerSGDState
        form: dict[str, Any] = dict(self.form) if who == OURS else {}
        return kind(group, self.rank, start_powerSGD_iter=2, **form), self.ours if who == OURS else self.theirs


def _powersgd(rank: int, ours: Callable[..., Any] = commhooks.powerSGD_hook, **form: Any) -> Twin:
    target = 0.45 if rank == 1 else 0.65
    return Twin(ours=ours, theirs=stock.powerSGD_hook, compute_target=target, rank=rank, form=tuple(form.items()))


TWINS = {
    "allreduce_hook": Twin(ours=commhooks.allreduce_hook, theirs=default_hooks.allreduce_hook, step_target=1.02),
    "fp16_compress_hook": Twin(
        ours=commhooks.fp16_compress_hook, theirs=default_hooks.fp16_compress_hook, step_target=1.02
    ),
    "bf16_compress_hook": Twin(ours=commhooks.bf16_compress_hook, theirs=bf16_under_another_name),
    "powerSGD_hook, rank 1": _powersgd(1),
    "powerSGD_hook, rank 4": _powersgd(4),
    "batched_powerSGD_hook, rank 1": _powersgd(1, commhooks.batched_powerSGD_hook),
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "alternating": {"alternating": True},
    "whole buckets": {"matrices": "whole-bucket"},
}
FORMS = {
    f"powerSGD_hook, rank {rank}, {name}": _powersgd(rank, **settings)
    for rank in (1, 4)
    for name, settings in _SETTINGS.items()
}
"""Variants of our hook that PyTorch's lacks; they are compared with its usual form, in compute time alone."""
_COMPUTING = {name: twin for name, twin in (TWINS | FORMS).items() if name != "allreduce_hook"}
"""The hooks whose compute is timed. On a single rank, our all-reduce has nothing to do, while PyTorch's divides by
one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A stack of linear layers, and the size of its buckets."""

    layers: int
    width: int
    batch: int = 8
    bucket_mib: float

    def model(self) -> nn.Module:
        """Return the model, the same on every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.layers)])


LARGE = "8 large layers"
JOBS = {
    "1,000 small parameters": Job(layers=500, width=32, bucket_mib=25),
    LARGE: Job(layers=8, width=768, bucket_mib=2.25),
    "40 buckets": Job(layers=40, width=128, bucket_mib=0.06),
}
_ONE_BUCKET = 1000.0  # MiB
_TINY = {"40 buckets": Job(layers=4, width=16, bucket_mib=0.001)}


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return the rows of all hooks."""
    shapes: dict[str, list[Shape]] = {"ResNet-18's gradients": resnet18_shapes(), "a GPT's gradients": GPT_SHAPES}
    jobs, rounds = (_TINY, 2) if quick else (JOBS, 8)
    weighed = next((name, job) for name, job in jobs.items() if quick or name == LARGE)
    steps = []
    for launch in range(1 if quick else 2):
        tell(f"hooks: step times, launch {launch + 1}")
        steps.append(on_ranks(partial(_time_steps, jobs, rounds), RANKS, tell, variables=KEEPS_FREED))
    rows = [
        beside(
            "PyTorch's",
            f"{name}: {place}",
            "step time",
            pooled([one[name, place] for one in steps]),
            seconds_in_words,
            target=TWINS[name].step_target,
            allows_spread=True,
        )
        for name, place in steps[0]
    ]
    tell("hooks: compute on one rank")
    given = {"tiny gradients": [(32, 32), (32,)]} if quick else shapes
    computed = on_ranks(partial(_time_calls, given, 2 + rounds), 1, tell)
    for (name, place), taken in computed.items():
        target = _COMPUTING[name].compute_target
        what = f"{name}: {place}", "compute of a call"
        rows.append(beside("PyTorch's", *what, taken, seconds_in_words, target=target))
    tell("hooks: collectives and bytes, memory")
    counted = on_ranks(partial(_count, *weighed), RANKS, tell)
    rows += [_exact(*key, *counts) for key, counts in counted.items()]
    if is_countable():
        grown = on_ranks(partial(_weigh, *weighed), RANKS, tell)
        for (name, place), taken in grown.items():
            rows.append(beside("PyTorch's", f"{name}: {place}", "peak memory", taken, bytes_in_words))
    return sorted(rows, key=lambda row: list(TWINS | FORMS).index(row.name.split(":")[0]))


def _exact(name: str, place: str, quantity: str, ours: float, theirs: float) -> Row:
    spread = Spread(ours / theirs, ours / theirs, ours / theirs)
    words = bytes_in_words if "bytes" in quantity else "{:g}".format
    return Row(
        name=f"{name}: {place}", quantity=quantity, spread=spread, absolute=f"{words(ours)}, PyTorch's {words(theirs)}"
    )


def _training_step(job: Job, ddp: str, twin: Twin, who: str) -> Callable[[], None]:
    model = wrap_in_ddp(job.model(), ddp, job.bucket_mib if twin.rank is None else _ONE_BUCKET)
    model.register_comm_hook(*twin.hook(who))  # type: ignore[operator]  # '"Tensor" not callable'
    return partial(forward_and_backward, model, torch.randn(job.batch, job.width))


def _time_steps(jobs: dict[str, Job], rounds: int, tell: Tell) -> dict[tuple[str, str], Seconds]:
    """Let all hooks of a job and a DDP take turns."""
    found: dict[tuple[str, str], Seconds] = {}
    for ddp, ddp_name in DDPS.items():
        for place, job in jobs.items():
            tell(f"hooks: {place}, {ddp_name}")
            keys = {f"{name}/{who}": (twin, who) for name, twin in TWINS.items() for who in (OURS, THEIRS, AGAIN)}
            steps = {key: _training_step(job, ddp, *which) for key, which in keys.items()}
            seconds = in_turns(steps, rounds, calls=2, warm_up=3)
            for name in TWINS:
                taken = {who: seconds[f"{name}/{who}"] for who in (OURS, THEIRS, AGAIN)}
                found[name, f"{place}, {ddp_name}"] = taken
    return found


def _time_calls(given: dict[str, list[Shape]], rounds: int, tell: Tell) -> dict[tuple[str, str], Seconds]:
    """Let all hooks average the same gradients, in the only bucket of the only rank."""
    found: dict[tuple[str, str], Seconds] = {}
    for place, shapes in given.items():
        like = [torch.zeros(shape) for shape in shapes]
        for name, twin in _COMPUTING.items():
            buckets = {who: GivenBucket(like) for who in (OURS, THEIRS, AGAIN)}
            gradient = torch.randn(buckets[OURS].buffer().shape)
            calls = {who: partial(_call, *twin.hook(who), bucket) for who, bucket in buckets.items()}
            prepare = partial(refill, buckets, gradient)
            found[name, place] = in_turns(calls, rounds, warm_up=4, clock=time.process_time, prepare=prepare)
    return found


def _call(state: Any, hook: Callable[..., Any], bucket: GivenBucket) -> None:
    hook(state, bucket).wait()


def _count(place: str, job: Job, tell: Tell) -> dict[tuple[str, str, str], list[float]]:
    """Count the collectives and bytes of a step: ours count themselves, PyTorch's pass a group that counts."""
    assert dist.group.WORLD is not None, "ranks have a default group"
    found = {}
    for name, twin in TWINS.items():
        group = LinkedGroup(dist.group.WORLD, Wire(LinkSettings()))
        counts = []
        for who in (OURS, THEIRS):
            model = wrap_in_ddp(job.model(), "torch", job.bucket_mib if twin.rank is None else _ONE_BUCKET)
            state, hook = twin.hook(who, None if who == OURS else group)
            model.register_comm_hook(state, hook)  # type: ignore[operator]  # as above
            step = partial(forward_and_backward, model, torch.randn(job.batch, job.width))
            counts.append(_counted(step, partial(_sent, who, state, group)))
            del model, step  # a DDP must go before its process group does
        for number, quantity in enumerate(("collectives", "payload bytes")):
            found[name, place, quantity] = [count[number] for count in counts]
        group.close()
    return found


def _counted(step: Callable[[], None], sent: Callable[[], tuple[int, int]]) -> tuple[float, float]:
    """Return the collectives and payload bytes of a step."""
    for _ in range(_STEPS_BEFORE):
        step()
    dist.barrier()
    before = sent()
    for _ in range(_COUNTED_STEPS):
        step()
    dist.barrier()
    collectives, payload = (after - earlier for after, earlier in zip(sent(), before, strict=True))
    return collectives / _COUNTED_STEPS, payload / _COUNTED_STEPS


def _sent(who: str, state: Any, group: LinkedGroup) -> tuple[int, int]:
    if who == THEIRS:
        found: list[Any] = list(group.traffic.values())
    else:
        found = [state.statistics()] if state is not None else list(commhooks.hook_statistics().values())
    return sum(one.collectives for one in found), sum(one.payload_bytes for one in found)


def _weigh(place: str, job: Job, tell: Tell) -> dict[tuple[str, str], Seconds]:
    return_freed_memory()
    found = {}
    for name, twin in TWINS.items():
        made = {who: partial(_training_step, job, "torch", twin, who) for who in (OURS, THEIRS, AGAIN)}
        found[name, place] = growth_in_turns(made, 2)
    return found
