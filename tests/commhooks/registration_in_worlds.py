"""What the tests of registration, and of wrappers around third-party hooks, run on every rank.

No postponed annotations here: PyTorch's DDP refuses a hook that has them.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock
from torch.futures import Future

import commhooks
from commhooks.hooks.by_name import DDPCommHookType, register_ddp_comm_hook
from tests.commhooks.models import Given, Shape, gradients_of, wrap

SHAPES: list[Shape] = [(30, 50), (50,), (40, 30), (), (60, 60), (7,)]
NO_SCALAR = [shape for shape in SHAPES if shape]  # PyTorch's PowerSGD fails at a 0-dim parameter
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.004}

Hook = Callable[[Any, Any], Any]


def integers(seed: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return each of two ranks' gradients: even integers below 64, whose mean is exact in bf16 and fp16 too."""
    generator = torch.Generator().manual_seed(seed)
    return [[2 * torch.randint(-32, 32, s, generator=generator).to(dtype) for s in SHAPES] for _ in range(2)]


def means(gradients: list[list[Tensor]]) -> list[Tensor]:
    return [(a + b) / 2 for a, b in zip(*gradients, strict=True)]


def given(kind: str, *shapes: Shape, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    return wrap(kind, Given(*(shapes or SHAPES), dtype=dtype), **(SEVERAL_BUCKETS | settings))


def hooked(kind: str, hook: Hook, state: Any = None, **settings: Any) -> nn.Module:
    model = given(kind, **settings)
    model.register_comm_hook(state, hook)  # type: ignore[operator]  # 'Tensor not callable'
    return model


def step(model: nn.Module, gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients after a backward pass of a real loss; torch's gradient of Re(w·g) is g's conjugate."""
    model.zero_grad()
    model(*[g.conj() for g in gradients]).real.backward()
    return gradients_of(model)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


# --- registration -----------------------------------------------------------------------------------------------------


def every_type(rank: int, kind: str) -> dict[str, tuple[float, float]]:
    """Return for each type the largest error of 3 steps' means, over both ranks and over a group of this rank alone."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    return {kind_of_hook.name: _errors(kind, kind_of_hook, rank, alone) for kind_of_hook in DDPCommHookType}


def _errors(kind: str, kind_of_hook: DDPCommHookType, rank: int, alone: dist.ProcessGroup) -> tuple[float, float]:
    together, by_itself = given(kind), given(kind)
    register_ddp_comm_hook(kind_of_hook, together)
    register_ddp_comm_hook(kind_of_hook, by_itself, alone)
    errors = [0.0, 0.0]
    for seed in range(3):
        gradients = [[g + 2**-4 + 2**-10 for g in one] for one in integers(seed)]
        for place, (model, expected) in enumerate([(together, means(gradients)), (by_itself, gradients[rank])]):
            distances = [
                float((a - b).abs().max()) for a, b in zip(step(model, gradients[rank]), expected, strict=True)
            ]
            errors[place] = max(errors[place], *distances)
    return errors[0], errors[1]


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "one bucket": {"bucket_cap_mb": 25},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


def late(rank: int, kind: str, name: str) -> list[str]:
    """Attach after 1 and 2 steps, before the forward pass and after it; return where a mean was wrong."""
    wrong = []
    for label, settings in SETTINGS.items():
        for steps_before in (1, 2):
            for after_forward in (False, True):
                model = given(kind, **settings)
                for number in range(steps_before + 3):
                    now = name if number == steps_before else None
                    gradients = integers(number)
                    if not same(_step_attaching(model, gradients[rank], now, after_forward), means(gradients)):
                        wrong.append(f"{label}, attached in step {steps_before}, {after_forward=}: step {number}")
    return wrong


def _step_attaching(model: nn.Module, gradients: list[Tensor], name: str | None, after_forward: bool) -> list[Tensor]:
    model.zero_grad()
    if name and not after_forward:
        commhooks.attach(model, name)
    loss = model(*gradients)
    if name and after_forward:
        commhooks.attach(model, name)
    loss.backward()
    return gradients_of(model)


def refused(rank: int, kind: str) -> None:
    """Attach where that cannot work; what was attached before keeps working."""
    gradients = integers(0)
    hooked_already = hooked(kind, stock.allreduce_hook)
    with pytest.raises(commhooks.AttachError, match=r"the hook allreduce_hook is registered on this model already"):
        commhooks.attach(hooked_already, "fp16")
    assert same(step(hooked_already, gradients[rank]), means(gradients))

    model = given(kind)
    told: list[str] = []
    handle = next(model.parameters()).register_hook(functools.partial(_attach_inside, model, told))
    step(model, gradients[rank])
    handle.remove()
    assert told == ["attach: a backward pass is under way; call attach between two passes."]
    commhooks.attach(model, "all-reduce")
    assert same(step(model, gradients[rank]), means(gradients))


def _attach_inside(model: nn.Module, told: list[str], _gradient: Tensor) -> None:
    try:
        commhooks.attach(model, "fp16")
    except commhooks.AttachError as error:
        told.append(str(error))


class Expert(nn.Module):
    """A model with a part that differs between ranks, which the DDP must ignore."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.own = nn.Linear(4, 3 + rank)
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.own(self.shared(inputs)).sum())


def unusual_models(rank: int, kind: str) -> dict[str, bool]:
    """Report for each unusual model or group whether attaching gives the right means."""
    right = {}
    for policy in ("fifo", "fused"):
        complex_model = given(kind, dtype=torch.complex64)
        commhooks.attach(complex_model, commhooks.make_compressor("powersgd", rank=2), policy=policy)
        gradients = integers(0, torch.complex64)
        right[f"complex, {policy}"] = same(step(complex_model, gradients[rank]), means(gradients))

    expert = wrap(kind, Expert(rank))
    commhooks.attach(expert, "all-reduce")
    expert(torch.ones(2, 4)).backward()
    right["ignored"] = expert.module.own.weight.grad is not None  # type: ignore[union-attr]  # 'Tensor'

    alone = [dist.new_group([r]) for r in range(2)]  # every rank makes every group
    model = given(kind)
    commhooks.attach(model, "all-reduce", process_group=alone[rank]).detach()
    gradients = integers(0)
    right["detached from another group"] = same(step(model, gradients[rank]), means(gradients))
    return right | _two_dtypes_in_a_static_graph(rank, kind)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(5, dtype=torch.float16))
        self.wide = nn.Parameter(torch.zeros(5))

    def forward(self, gradient: Tensor) -> Tensor:
        return torch.as_tensor((self.narrow * gradient.half()).sum().float() + (self.wide * gradient).sum())


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.table(words)).sum())


def no_end_of_a_step(rank: int) -> list[str]:
    """Attach to a DDP that has several buckets at first and marks none as the last; return the errors."""
    errors = []
    dense = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for module, settings in ((WithTable(), {}), (TwoDtypes(), {}), (dense, {"bucket_cap_mb_list": [1]})):
        model = wrap("torch", module, static_graph=True, **settings)
        ways: list[Callable[[], Any]] = [
            functools.partial(commhooks.attach, model, "powersgd", policy="fused"),
            functools.partial(commhooks.attach, model, "powersgd", atomic=True),
            functools.partial(commhooks.PowerSGDState(None, policy="fused").bind, model),
        ]
        for way in ways:
            try:
                way()
            except commhooks.AttachError as error:
                errors.append(str(error))
            else:
                errors.append("nothing")
    return errors


def _two_dtypes_in_a_static_graph(rank: int, kind: str) -> dict[str, bool]:
    model = wrap(kind, TwoDtypes(), static_graph=True)
    if kind == "torch":
        with pytest.raises(commhooks.AttachError, match="policy must be 'fifo'.* for PyTorch's.*several dtypes"):
            commhooks.attach(model, "all-reduce", policy="fused")
    attachment = commhooks.attach(model, "all-reduce", policy="fifo" if kind == "torch" else "fused")
    right = []
    for _ in range(3):
        model.zero_grad()
        model(torch.full((5,), 2.0 * rank)).backward()
        right += [torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients_of(model)]
    return {"two dtypes in a static graph": all(right) and len(right) == 6 and attachment.steps == 3}


def a_detach_after_an_error(rank: int, kind: str) -> str:
    """Detach in a `finally`, from a backward pass that rank 0's own function broke; return rank 0's error."""
    model = given(kind)
    attachment = commhooks.attach(model, "all-reduce", policy="fused", hook_timeout=5.0)
    if rank == 0:
        next(model.parameters()).register_hook(_break)
    try:
        step(model, integers(0)[rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        attachment.detach()
        assert "commhooks" not in [thread.name for thread in threading.enumerate()]
    return "nothing"


def _break(_gradient: Tensor) -> None:
    raise ArithmeticError("the user's own")


def attach_alone(rank: int) -> tuple[str, str]:
    """Attach while the other rank never does; and on a group that this rank does not belong to."""
    model = given("torch")
    told = []
    foreign, impatient = dist.new_group([1]), dist.new_group([0, 1], timeout=timedelta(seconds=3))
    if rank == 0:
        for group in (foreign, impatient):
            try:
                commhooks.attach(model, "fp16", process_group=group)
            except commhooks.CommHooksError as error:
                told.append(f"{type(error).__name__}: {error}")
    return (told[0], told[1]) if told else ("", "")


def one_state_for_two_models(rank: int, kind: str, how: str) -> str:
    """Return the errors for a state that two models share, in turns or in one backward pass."""
    state = commhooks.PowerSGDState(None, start_powerSGD_iter=0)
    models = [hooked(kind, commhooks.powerSGD_hook, state) for _ in range(2)]
    try:
        for number in range(3):
            losses = [model(*integers(number)[rank]) for model in models]
            for loss in losses if how == "in turns" else [torch.stack(losses).sum()]:
                loss.backward()
    except Exception as error:
        return str(error)
    return "nothing"


def what_stateless_hooks_count(rank: int, kind: str) -> dict[str, tuple[int, int]]:
    """Return the steps and payload bytes of each compressor, after two steps of two hooks on three models."""
    models = [
        hooked(kind, hook, bucket_cap_mb=100) for hook in (commhooks.allreduce_hook, commhooks.fp16_compress_hook)
    ]
    models.append(hooked(kind, commhooks.allreduce_hook, bucket_cap_mb=100))
    for model in models * 2:
        step(model, integers(0)[rank])
    return {name: (counted.steps, counted.payload_bytes) for name, counted in commhooks.hook_statistics().items()}


# --- other people's hooks ---------------------------------------------------------------------------------------------


def reduced(bucket: Any) -> Any:
    """Start the bucket's average."""
    bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(bucket.buffer(), async_op=True)


def plain(state: Any, bucket: Any) -> Any:
    return reduced(bucket).get_future().then(lambda future: future.value()[0])


def in_place_afterwards(state: Any, bucket: Any) -> Any:
    """Keep the buffer, and write into it when the sum is there."""
    kept = bucket.buffer()
    return dist.all_reduce(kept, async_op=True).get_future().then(lambda _: kept.div_(2))


def looks_again_afterwards(state: Any, bucket: Any) -> Any:
    return reduced(bucket).get_future().then(lambda _: bucket.buffer())


def with_a_graph(state: Any, bucket: Any) -> Any:
    """Return a mean that requires gradients, from Gloo's thread on the rank that waits for the other."""
    time.sleep(0.01 * dist.get_rank())
    return reduced(bucket).get_future().then(lambda f: f.value()[0] + 0 * bucket.parameters()[0].sum())


def by_set_buffer(state: Any, bucket: Any) -> Any:
    bucket.set_buffer(bucket.buffer().clone())
    return reduced(bucket)


def ready_at_once(state: Any, bucket: Any) -> Any:
    mean = bucket.buffer().double() / 2
    dist.all_reduce(mean)
    future: Future[Tensor] = Future()
    future.set_result(mean)
    return future


class WithoutFuture(dist.Work):
    """A Work that can be waited for, and nothing else."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: Any = None) -> bool:
        self.inner.wait()
        return True


@dataclasses.dataclass
class Unhashable:
    """An unhashable hook."""

    divisor: int

    def __call__(self, state: Any, window: Any) -> Any:
        return plain(state, window)

    def method(self, state: Any, window: Any) -> Any:
        return plain(state, window)


def counting(state: Any, bucket: Any, *, more: int) -> Any:
    return plain(state, bucket)


FOREIGN: dict[str, Hook] = {
    "PyTorch's allreduce": stock.allreduce_hook,
    "PyTorch's fp16": stock.fp16_compress_hook,
    "PyTorch's fp16 wrapper": stock.fp16_compress_wrapper(stock.allreduce_hook),
    "a future of a tensor": plain,
    "a future of a list": lambda s, b: reduced(b).get_future(),
    "a work": lambda s, b: reduced(b),
    "a work without a future": lambda s, b: WithoutFuture(reduced(b)),
    "a tensor": lambda s, b: (reduced(b).wait(), b.buffer())[1],
    "another shape": lambda s, b: (reduced(b).wait(), b.buffer().clone().view(1, -1))[1],
    "another dtype, ready at once": ready_at_once,
    "in place, afterwards": in_place_afterwards,
    "the buffer, looked up afterwards": looks_again_afterwards,
    "a result that requires gradients": with_a_graph,
    "a buffer of its own": by_set_buffer,
    "a lambda": lambda s, w: plain(s, w),  # noqa: PLW0108 (a lambda is what is tested)
    "a partial": functools.partial(counting, more=1),
    "a partial of ours": functools.partial(commhooks.allreduce_hook),
    "a callable object": Unhashable(2),
    "a bound method": Unhashable(2).method,
    "a wrapper round a wrapper": commhooks.bf16_compress_wrapper(plain),
}
WRAPPERS = {torch.float16: commhooks.fp16_compress_wrapper, torch.bfloat16: commhooks.bf16_compress_wrapper}


class Spy:
    """Two hooks: one inside a wrapper, which sees the wrapper's input, and one around it, which sees its result."""

    def __init__(self, hook: Hook, dtype: torch.dtype) -> None:
        self.seen: set[torch.dtype] = set()
        self.restored = True
        self._hook = hook
        self._wrapped: Any = WRAPPERS[dtype](self._inside)

    def _inside(self, state: Any, bucket: Any) -> Any:
        self.seen.add(bucket.buffer().dtype)
        return self._hook(state, bucket)

    def round_it(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        own = bucket.buffer()
        future: Future[Tensor] = self._wrapped(state, bucket)
        future.wait()
        left = bucket.buffer()
        self.restored &= left.data_ptr() == own.data_ptr() and left.dtype == own.dtype
        self.restored &= future.value().data_ptr() == own.data_ptr() and not own.requires_grad
        return future


def foreign_hooks(rank: int, kind: str) -> list[str]:
    """Wrap every hook of the table in both dtypes; name those that gave a wrong mean or left a wrong buffer."""
    wrong = []
    for name, hook in FOREIGN.items():
        for dtype in WRAPPERS:
            spy = Spy(hook, dtype)
            model = hooked(kind, spy.round_it)
            for seed in range(3):
                gradients = integers(seed)
                right = same(step(model, gradients[rank]), means(gradients))
                if not (right and spy.restored and spy.seen == {dtype}):
                    wrong.append(f"{name}, {dtype}, step {seed}: {right=} {spy.restored=} {spy.seen=}")
    return wrong


def noop_of_pytorchs(rank: int, kind: str) -> bool:
    """Wrap PyTorch's no-op: the bucket comes back as it was, but for the cast."""
    gradients = integers(0)[rank]
    return same(step(hooked(kind, commhooks.fp16_compress_wrapper(debugging_hooks.noop_hook)), gradients), gradients)


def powersgd_of_pytorchs(rank: int, kind: str) -> bool:
    """Wrap PyTorch's PowerSGD in our wrapper and in theirs, in one bucket; return whether 6 steps agree bit for bit."""
    wrappers: list[Any] = [commhooks.fp16_compress_wrapper, stock.fp16_compress_wrapper]
    models = []
    for wrapper in wrappers:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        models.append(wrap(kind, Given(*NO_SCALAR)))
        models[-1].register_comm_hook(state, wrapper(powerSGD_hook.powerSGD_hook))  # type: ignore[operator]  # 'Tensor not callable'
    lossy = False
    for seed in range(6):
        gradients = [[g for g in one if g.dim()] for one in integers(seed)]
        ours, theirs = (step(model, gradients[rank]) for model in models)
        if not same(ours, theirs):
            return False
        lossy |= not same(ours, means(gradients))
    return lossy


def what_survives_the_wire(rank: int, kind: str) -> dict[str, list[float]]:
    """Return what comes of some gradients, the same on both ranks, under wrappers and wrappers of wrappers."""
    fp16, bf16 = commhooks.fp16_compress_wrapper, commhooks.bf16_compress_wrapper
    given_ = torch.tensor([1 + 2**-10, 2049.0, 49152.0, 2.0**17])
    results = {}
    for name, hook in {"ours": commhooks.allreduce_hook, "theirs": stock.allreduce_hook}.items():
        wrapped = {"fp16": fp16(hook), "bf16": bf16(hook)}
        wrapped |= {"fp16 of bf16": fp16(bf16(hook)), "bf16 of fp16": bf16(fp16(hook))}
        for label, wrapper in wrapped.items():
            model = wrap(kind, Given((4,)))
            model.register_comm_hook(None, wrapper)  # type: ignore[operator]  # 'Tensor not callable'
            results[f"{label} of {name}"] = step(model, [given_.clone()])[0].tolist()
    return results


def odd_dtypes(rank: int, kind: str) -> dict[str, bool]:
    """Report for wrapped hooks and dtypes whether the mean comes back exact, in the bucket's own dtype."""
    exact = {}
    for name, hook in {"ours": commhooks.allreduce_hook, "theirs": stock.allreduce_hook, "mine": plain}.items():
        for wire, wrapper in WRAPPERS.items():
            for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
                gradients = integers(1, dtype)
                if dtype.is_complex:
                    gradients = [[g * (1 + 1j) for g in one] for one in gradients]
                model = hooked(kind, wrapper(hook), dtype=dtype)
                exact[f"{name}, {dtype} on {wire}"] = same(step(model, gradients[rank]), means(gradients))
            exact[f"{name}, sparse on {wire}"] = _sparse_is_exact(rank, kind, wrapper(hook))
    return exact


def _sparse_is_exact(rank: int, kind: str, hook: Hook) -> bool:
    """Look up rows 0 and 1, or 1 and 2, in a table whose gradient is sparse."""
    table = nn.Embedding(5, 3, sparse=True)
    model = wrap(kind, table)
    model.register_comm_hook(None, hook)  # type: ignore[operator]  # 'Tensor not callable'
    right = True
    for _ in range(2):
        model.zero_grad()
        (model(torch.tensor([rank, rank + 1])).sum() * 4).backward()
        gradient = table.weight.grad
        assert gradient is not None
        expected = torch.tensor([2.0, 4.0, 2.0, 0.0, 0.0]).unsqueeze(1).expand(5, 3)
        right &= gradient.is_sparse and torch.equal(gradient.to_dense(), expected)
    return right


# --- hooks that go wrong ----------------------------------------------------------------------------------------------


class Failing:
    """Fail in a given way; keep the buckets for inspection."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.kept: list[tuple[Any, Tensor]] = []

    def hook(self, state: Any, bucket: Any) -> Any:
        self.kept[-1:] = [(bucket, self.kept[-1][1])]
        if self.how == "raises":
            raise OSError("no such luck")
        return self._returned(bucket)

    def remember(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Run wrapped, and note the bucket's memory before."""
        self.kept.append((bucket, bucket.buffer()))
        future: Future[Tensor] = self.wrapped(state, bucket)
        return future

    @functools.cached_property
    def wrapped(self) -> Any:
        return commhooks.fp16_compress_wrapper(self.hook)

    def _returned(self, bucket: Any) -> Any:
        future: Future[Any] = Future()
        if self.how == "callback raises":
            future.set_result(None)
            return future.then(lambda _: 1 / 0)
        if self.how == "exception set":
            future.set_exception(OSError("no such luck"))
            return future
        held = {"None held": None, "one element": torch.ones(1), "two tensors": [bucket.buffer(), bucket.buffer()]}
        held |= {"complex": bucket.buffer().to(torch.complex64), "sparse": bucket.buffer().float().to_sparse()}
        if self.how in held:
            future.set_result(held[self.how])
            return future
        return {"None": None, "number": 3, "buckets": [bucket]}[self.how]

    def all_restored(self) -> bool:
        return all(
            bucket.buffer().dtype == own.dtype and bucket.buffer().data_ptr() == own.data_ptr()
            for bucket, own in self.kept
        )


def failing_hooks(rank: int, kind: str, hows: list[str]) -> dict[str, tuple[str, str, bool]]:
    """Return for each way to fail the error's type, its text, and whether buckets got their own buffer back."""
    told = {}
    for how in hows:
        failing = Failing(how)
        model = hooked(kind, failing.remember, bucket_cap_mb=25)
        try:
            step(model, integers(0)[rank])
        except Exception as error:
            told[how] = (type(error).__name__, str(error), failing.all_restored() and len(failing.kept) == 1)
    return told


def misused(rank: int, kind: str) -> dict[str, tuple[str, str]]:
    """Register what is no hook, or has no state; return what is raised, at registration or at the first bucket."""
    mistakes: dict[str, tuple[Any, Any]] = {
        "compressor": (None, commhooks.PowerSGD(rank=4)),
        "class": (None, commhooks.PowerSGD),
        "no state": (None, commhooks.powerSGD_hook),
        "compressor as state": (commhooks.PowerSGD(rank=4), commhooks.batched_powerSGD_hook),
        "no state in a wrapper": (None, commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook)),
    }
    told = {}
    for what, (state, hook) in mistakes.items():
        model = given(kind)
        try:
            model.register_comm_hook(state, hook)  # type: ignore[operator]  # 'Tensor not callable'
        except Exception as error:
            told[what] = "register", str(error)
            continue
        with pytest.raises(commhooks.HookTypeError) as refused:
            step(model, integers(0)[rank])
        told[what] = "backward", str(refused.value)
    return told
