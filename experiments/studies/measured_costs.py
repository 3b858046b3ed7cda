"""The study `costs`: the costs of compression of which `commhooks.experiments.planning` makes tables.

Two ranks take steps of made-up models whose parameters all have the same shape, in turns with and without a hook.
Collectives are answered at once, so the hook's cost is the time that it adds to a step, on a core that it shares with
the backward pass. The worker's segments divide the cost among the rounds, and steps as one of more ranks show how it
grows with the number of ranks. Steps without real collectives are timed in CPU time, which other programs do not
increase.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import commhooks
import ddp_core
from commhooks import Compressor
from commhooks.communicators.parent_group import group_or_default
from commhooks.compressors import Cast
from commhooks.experiments.commands.terminal import errors_in_words
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.launch import Send, run_world
from commhooks.experiments.machine import machine, versions
from commhooks.experiments.planning.costs import Costs, HookCosts, Sample, copy_seconds
from commhooks.experiments.planning.segments import BucketRecord, Segments, Watched
from commhooks.experiments.planning.worlds import check_place
from commhooks.experiments.specs import Spec
from commhooks.experiments.timing.pretending import PretendingConnection, attach_pretending
from commhooks.experiments.timing.step_time import Sends
from commhooks.native import compiled

HOOKS = (
    "all-reduce",
    "fp16",
    "bf16",
    "fp8",
    "mxfp8",
    "natural",
    "int8",
    "int4",
    "mxfp4",
    "qsgd",
    "terngrad",
    "sign",
    "signum",
    "affine",
    "top-k:ratio=0.01",
    "top-k:ratio=0.1",
    "dgc:ratio=0.01",
    "random-k:ratio=0.01",
    "random-block:ratio=0.01",
    "demo",
    "sparse-loco",
    *(f"powersgd:rank={rank}" for rank in (1, 2, 4, 8, 32)),
)
LEFT_OUT: Mapping[str, str] = {
    "noop": "it sends nothing",
    "adaptive-rank": "its ranks change in training: take the powersgd of the rank that it settles at",
    "bf16-two-hop": "bf16 sends the same bytes in one hop",
    "fp16-two-hop": "fp16 sends the same bytes in one hop",
    "codebook": "its passes are eager only, so its cost says little about the algorithm",
    "e3m0": "mxfp4 sends nearly the same bytes, and loses less",
    "distro": "it is demo with other settings",
    "powersgd-unbiased": "it is powersgd without its residual",
    "svd": "it is far slower than powersgd, which approximates it",
    "threshold": "the bytes that it sends depend on the gradients",
}
"""The names of compressors whose costs are not measured, and why."""
_BATCH = 64  # rows
_WARM_UP = 2  # steps that are not counted
_TIMEOUT = 120.0  # seconds without a message
_PROBES = 9
_LARGE = 1 << 22  # elements of fp32
_WIRES = (torch.float32, torch.float16, torch.bfloat16)
_HOPS = 2  # of an all-reduce of two ranks
_SMALL, _SMALL_ROUNDS = "powersgd:rank=1", 2
_MANY = 8  # ranks as one of which growth with their number is measured
_LEAST_GROWTH = 0.01  # a rank; less is noise


@dataclasses.dataclass(frozen=True)
class Model:
    """A made-up model whose parameters all have the same shape."""

    shape: tuple[int, ...]
    count: int
    bucket_mib: float

    @property
    def elements(self) -> int:
        """The elements of one parameter."""
        return torch.Size(self.shape).numel()

    @property
    def buckets(self) -> int:
        """The number of buckets that its DDP makes."""
        return round(4 * self.elements * self.count / 2**20 / self.bucket_mib)

    def make(self) -> nn.Module:
        """Return the model; its parameters are the same on every rank."""
        torch.manual_seed(0)
        side = self.shape[-1]
        if len(self.shape) == 1:
            return nn.Sequential(*(nn.LayerNorm(side, bias=False) for _ in range(self.count)))
        return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(self.count)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement."""

    hooks: tuple[str, ...] = HOOKS
    matrices: tuple[Model, ...] = (
        Model((64, 64), 64, 0.25),
        Model((256, 256), 32, 2.0),
        Model((1024, 1024), 4, 4.0),
    )  # in four buckets each
    vector: Model = Model((256,), 128, 1 / 32)
    split: Model = Model((256, 256), 32, 0.25)  # as in `matrices`, in more buckets
    turns: int = 9
    passes: int = 3
    """The number of passes over all hooks. Other work on the machine then disturbs one pass, and not a hook's
    figure."""


def measure(plan: Plan, tell: Callable[[str], None]) -> Costs:
    """Measure all costs on two ranks.

    Raises:
        ValueError: There is no such hook.
        WorldError: A rank failed.

    """
    found: list[Costs] = []
    for hook in plan.hooks:
        make_hook(Spec.parse(hook))

    def hear(message: object) -> None:
        found.append(message) if isinstance(message, Costs) else tell(str(message))

    run_world(_measure, 2, plan, hear, timeout=_TIMEOUT)
    return found[0]


def costs(file: Annotated[Path, typer.Argument(help="Receives the costs, in minutes.")]) -> None:
    """Measure the costs of compression, in copies of memory, for the tables of `commhooks plan`."""
    with errors_in_words():
        check_place(file)
        found = measure(Plan(), print)
        found.write(file)
        print(f"{file}: the costs of {len(found.hooks)} hooks")


def _measure(rank: int, ranks: int, plan: Plan, send: Send) -> None:
    torch.set_num_threads(1)
    found = []
    for number in range(plan.passes):
        if rank == 0:
            send(f"pass {number + 1} of {plan.passes}")
        found.append(_one_pass(plan, send if rank == 0 else lambda text: None))
    if rank == 0:
        send(median_of(found))


def median_of(values: Sequence[Any]) -> Any:
    """Return the median of numbers, or the same structure with the medians of the numbers in it."""
    first = values[0]
    if isinstance(first, float):
        return statistics.median(values)
    if isinstance(first, dict):
        return {key: median_of([one[key] for one in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(median_of(some) for some in zip(*values, strict=True))
    if isinstance(first, Costs | HookCosts | Sample):
        own = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: median_of([getattr(one, name) for one in values]) for name in own})
    return first


def _one_pass(plan: Plan, tell: Callable[[str], None]) -> Costs:
    """Measure everything once; every rank calls this."""
    copies = [_copy_seconds()]
    hop = _seconds_of(torch.zeros(1)) / _HOPS
    by_dtype = {}
    for dtype in _WIRES:  # two ranks send each byte of a large all-reduce
        tensor = torch.zeros(_LARGE, dtype=dtype)
        seconds = max(0.0, _seconds_of(tensor) - _HOPS * hop)
        by_dtype[dtype] = seconds / (_LARGE * tensor.element_size()) / (copies[0] / 4)
    round_seconds = _round_seconds(plan, hop)
    tell(f"a hop {hop * 1e6:.0f} µs, a round {round_seconds * 1e6:.0f} µs, copies per byte {by_dtype}")
    hooks = {}
    for hook in plan.hooks:
        copies.append(_copy_seconds())  # beside each hook: the time of a copy changes with the load of the machine
        hooks[hook] = own = _costs_of(make_hook(Spec.parse(hook)), plan, copies[-1], by_dtype)
        tell(f"{hook}: {own.bucket_seconds * 1e3:.2f} ms a bucket, and copies of one element:")
        samples = (*own.matrices, own.vector)
        tell("".join(f"  {sum(one.rounds) / one.elements:.1f} (of {one.elements:,})" for one in samples))
    here = machine()
    return Costs(
        hooks=hooks,
        hop_seconds=hop,
        round_seconds=round_seconds,
        copy_rate=4 / statistics.median(copies),
        machine={name: here[name] for name in ("system", "processor", "cores")},
        versions=versions(),
        level=compiled().level,
    )


def _copy_seconds() -> float:
    """Return the mean over ranks of the seconds of a copy, timed on all at once, since all compress at once."""
    own = torch.tensor(copy_seconds())
    dist.all_reduce(own)
    return float(own) / dist.get_world_size()


def _costs_of(compressor: Compressor, plan: Plan, copy: float, by_dtype: Mapping[torch.dtype, float]) -> HookCosts:
    """Measure one hook; every rank calls this."""
    added = {model: _added(compressor, model, plan.turns) for model in {*plan.matrices, plan.vector, plan.split}}
    whole = next(model for model in plan.matrices if (model.shape, model.count) == (plan.split.shape, plan.split.count))
    more = added[plan.split].seconds - added[whole].seconds
    bucket = max(0.0, more / (plan.split.buckets - whole.buckets))
    rounds = max(len(added[model].by_round) for model in (*plan.matrices, plan.vector))

    def sample(model: Model) -> Sample:
        own = added[model]
        *before, after = own.by_round
        shares = [*before, *[0.0] * (rounds - len(own.by_round)), after]
        copies = max(0.0, own.seconds - bucket * model.buckets) / model.count / copy
        return Sample(model.elements, tuple(copies * share / sum(shares) for share in shares))

    return HookCosts(
        compressor=str(compressor),
        bucket_seconds=bucket,
        matrices=tuple(map(sample, plan.matrices)),
        vector=sample(plan.vector),
        copies_per_byte=by_dtype[compressor.dtype if isinstance(compressor, Cast) else torch.float32],
        growth=_growth(added[whole], _added(compressor, whole, plan.turns, as_ranks=_MANY)),
    )


def _growth(few: Added, many: Added) -> tuple[float, ...]:
    """Return the fractions by which each rank beyond two increases the cost of each round, and after the last one."""
    # Only after a gather does a rank get answers that grow with the ranks.
    grows = [False, *(any(kind == "all-gather" for kind, _ in sent) for sent in few.sends)]
    found = []
    for own, with_many, may in zip(few.by_round, many.by_round, grows, strict=True):
        each = (with_many / own - 1) / (_MANY - dist.get_world_size()) if own > 0 else 0.0
        found.append(each if may and each > _LEAST_GROWTH else 0.0)
    return tuple(found)


def _round_seconds(plan: Plan, hop: float) -> float:
    """Return the seconds that a round of few real bytes adds to a step, besides its messages."""
    compressor = make_hook(Spec.parse(_SMALL))
    pretended = _added(compressor, plan.split, plan.turns, clock=time.perf_counter).seconds
    real = _added(compressor, plan.split, plan.turns, clock=time.perf_counter, is_real=True).seconds
    return max(0.0, (real - pretended) / (_SMALL_ROUNDS * plan.split.buckets) - _HOPS * hop)


@dataclasses.dataclass(frozen=True)
class Added:
    """The time that a hook adds to a step."""

    seconds: float
    by_round: tuple[float, ...]
    """Seconds of compression before each round and after the last one, summed over buckets."""
    sends: tuple[Sends, ...]
    """The messages of the bucket with the most rounds."""


def _added(
    compressor: Compressor,
    model: Model,
    turns: int,
    *,
    clock: Callable[[], float] = time.process_time,
    as_ranks: int | None = None,
    is_real: bool = False,
) -> Added:
    """Return the time that a hook adds to a step: medians over turns; `seconds` is also the mean over ranks.

    Its collectives are answered at once, as if to one of `as_ranks` ranks, or are real ones over the loopback.
    """
    plain = ddp_core.DistributedDataParallel(model.make(), bucket_cap_mb=model.bucket_mib)
    plain.register_comm_hook(None, _answer)
    hooked = ddp_core.DistributedDataParallel(model.make(), bucket_cap_mb=model.bucket_mib)
    segments = Segments(time.thread_time)
    watched = Watched(inner=compressor, segments=segments)
    if is_real:
        attachment = commhooks.attach(hooked, watched)
    else:
        connection = PretendingConnection(group_or_default(None), as_ranks or dist.get_world_size(), segments)
        attachment = attach_pretending(hooked, watched, connection)
    batch = torch.randn(_BATCH, model.shape[-1])
    found, by_round = [], []
    for turn in range(-_WARM_UP, turns):
        without = _step(plain, batch, clock)
        segments.begin_step()
        within = _step(hooked, batch, clock) - segments.own_seconds
        if turn >= 0:
            found.append(within - without)
            by_round.append(_by_round(segments.buckets))
    attachment.close()
    added = torch.tensor(statistics.median(found))
    dist.all_reduce(added)
    return Added(
        float(added) / dist.get_world_size(),
        tuple(map(statistics.median, zip(*by_round, strict=True))),
        max((tuple(bucket.sends) for bucket in segments.buckets), key=len),
    )


def _by_round(buckets: Sequence[BucketRecord]) -> list[float]:
    """Return the seconds of compression before each round and after the last one, summed over buckets."""
    rounds = zip_longest(*(bucket.seconds for bucket in buckets), fillvalue=0.0)
    return [*map(sum, rounds), sum(bucket.after for bucket in buckets)]


def _step(ddp: nn.Module, batch: Tensor, clock: Callable[[], float]) -> float:
    """Return the seconds of a step, which all ranks begin together."""
    dist.barrier()
    begun = clock()
    ddp(batch).square().mean().backward()
    seconds = clock() - begun
    ddp.zero_grad()
    return seconds


def _answer(state: object, bucket: ddp_core.GradBucket) -> torch.futures.Future[Tensor]:
    answered: torch.futures.Future[Tensor] = torch.futures.Future()
    answered.set_result(bucket.buffer())
    return answered


def _seconds_of(tensor: Tensor) -> float:
    """Return the median seconds of an all-reduce of the tensor."""
    found = []
    for _ in range(_PROBES):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)
