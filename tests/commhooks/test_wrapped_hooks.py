"""The wrappers of a narrow wire around hooks of others, and around what is no hook.

No postponed annotations here: PyTorch's DDP refuses a hook that has them.
"""

import dataclasses
import functools
import gc
import math
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock
from torch.futures import Future

import commhooks
from commhooks.compressors import PowerSGD
from commhooks.errors import GradientError, HookTypeError
from commhooks.hooks import default as default_hooks
from tests.commhooks.exact import SHAPES, Hook, hooked, integers, means, same, step
from tests.commhooks.models import Given, wrap
from tests.commhooks.told import told_by
from tests.ddp_core.facts import BOTH_DDPS, Facts
from tests.world import on_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
facts = Facts(kinds=BOTH_DDPS)


NO_SCALAR = [shape for shape in SHAPES if shape]  # PyTorch's PowerSGD fails at a 0-dim parameter


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
    "a future of a tensor": plain,
    "a work": lambda s, b: reduced(b),
    "a work without a future": lambda s, b: WithoutFuture(reduced(b)),
    "a tensor": lambda s, b: (reduced(b).wait(), b.buffer())[1],
    "another shape": lambda s, b: (reduced(b).wait(), b.buffer().clone().view(1, -1))[1],
    "another dtype, ready at once": ready_at_once,
    "in place, afterwards": in_place_afterwards,
    "a result that requires gradients": with_a_graph,
    "a buffer of its own": by_set_buffer,
    "a lambda": lambda s, w: plain(s, w),  # noqa: PLW0108 (a lambda is what is tested)
    "a partial": functools.partial(counting, more=1),
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


@facts
def a_wrapper_takes_every_kind_of_hook_and_result(rank: int, kind: str) -> None:
    """In both dtypes; the bucket gets its own buffer back."""
    for name, hook in FOREIGN.items():
        for dtype in WRAPPERS:
            spy = Spy(hook, dtype)
            model = hooked(kind, spy.round_it)
            for seed in range(3):
                gradients = integers(seed)
                right = same(step(model, gradients[rank]), means(gradients))
                assert right and spy.restored and spy.seen == {dtype}, (name, dtype, seed, spy.restored, spy.seen)


SURVIVES = {"fp16": [1 + 2**-10, 2048.0, 49152.0, math.inf], "bf16": [1.0, 2048.0, 49152.0, 2.0**17]}
"""By the outer wrapper: what comes of 1 + 2**-10, 2049, 49152 and 2**17."""


@facts
def the_wire_has_the_outer_wrappers_dtype_and_a_sum_beyond_it_does_no_harm(rank: int, kind: str) -> None:
    """Under wrappers and wrappers of wrappers; the gradients are the same on both ranks."""
    fp16, bf16 = commhooks.fp16_compress_wrapper, commhooks.bf16_compress_wrapper
    given = torch.tensor([1 + 2**-10, 2049.0, 49152.0, 2.0**17])
    for name, hook in {"ours": commhooks.allreduce_hook, "theirs": stock.allreduce_hook}.items():
        wrapped = {"fp16": fp16(hook), "bf16": bf16(hook)}
        wrapped |= {"fp16 of bf16": fp16(bf16(hook)), "bf16 of fp16": bf16(fp16(hook))}
        for label, wrapper in wrapped.items():
            model = wrap(kind, Given((4,)))
            model.register_comm_hook(None, wrapper)  # type: ignore[operator]  # 'Tensor not callable'
            expected = SURVIVES[label.split()[0]]
            assert step(model, [given.clone()])[0].tolist() == expected, (label, name)


@on_ranks(2)
@pytest.mark.parametrize("kind", BOTH_DDPS)
def test_wide_narrow_complex_and_sparse_gradients_keep_their_dtype_and_their_mean(rank: int, kind: str) -> None:
    """Whoever's the hook in the wrapper is."""
    for name, hook in {"ours": commhooks.allreduce_hook, "theirs": stock.allreduce_hook, "mine": plain}.items():
        for wire, wrapper in WRAPPERS.items():
            for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
                gradients = integers(1, dtype)
                if dtype.is_complex:
                    gradients = [[g * (1 + 1j) for g in one] for one in gradients]
                model = hooked(kind, wrapper(hook), dtype=dtype)
                assert same(step(model, gradients[rank]), means(gradients)), (name, dtype, wire)
            _demand_exact_sparse_means(rank, kind, wrapper(hook))


def _demand_exact_sparse_means(rank: int, kind: str, hook: Hook) -> None:
    """Look up rows 0 and 1, or 1 and 2, in a table whose gradient is sparse."""
    table = nn.Embedding(5, 3, sparse=True)
    model = wrap(kind, table)
    model.register_comm_hook(None, hook)  # type: ignore[operator]  # 'Tensor not callable'
    for _ in range(2):
        model.zero_grad()
        (model(torch.tensor([rank, rank + 1])).sum() * 4).backward()
        gradient = table.weight.grad
        assert gradient is not None
        expected = torch.tensor([2.0, 4.0, 2.0, 0.0, 0.0]).unsqueeze(1).expand(5, 3)
        assert gradient.is_sparse and torch.equal(gradient.to_dense(), expected)


# --- hooks that go wrong ----------------------------------------------------------------------------------------------


FAILURES = {
    "None": "expected a torch.futures.Future, a Tensor or a torch.distributed.Work to be returned (got NoneType)",
    "raises": "OSError: no such luck",
    "callback raises": "ZeroDivisionError: division by zero",
    "None held": "shape (6358,), torch.float32, torch.strided on cpu (got NoneType)",
    "one element": "(got shape (1,), torch.float32",
    "complex": "(got shape (6358,), torch.complex64",
    "sparse": "torch.sparse_coo on cpu)",
}


class Failing:
    """Fail in a given way; keep the buckets for inspection."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.kept: list[tuple[Any, Tensor]] = []

    def hook(self, state: Any, bucket: Any) -> Any:
        self.kept[-1:] = [(bucket, self.kept[-1][1])]
        if self.how == "raises":
            raise OSError("no such luck")
        future: Future[Any] = Future()
        held = {"None held": None, "one element": torch.ones(1), "callback raises": None}
        held |= {"complex": bucket.buffer().to(torch.complex64), "sparse": bucket.buffer().float().to_sparse()}
        future.set_result(held.get(self.how))
        if self.how == "callback raises":
            return future.then(lambda _: 1 / 0)
        return future if self.how in held else None

    def remember(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Run wrapped, and note the bucket's memory before."""
        self.kept.append((bucket, bucket.buffer()))
        future: Future[Tensor] = self.wrapped(state, bucket)
        return future

    @functools.cached_property
    def wrapped(self) -> Any:
        return commhooks.fp16_compress_wrapper(self.hook)

    def all_restored(self) -> bool:
        return all(
            bucket.buffer().dtype == own.dtype and bucket.buffer().data_ptr() == own.data_ptr()
            for bucket, own in self.kept
        )


@facts
def a_hook_that_goes_wrong_in_a_wrapper_is_named_and_the_bucket_gets_its_buffer_back(rank: int, kind: str) -> None:
    parameters = "weights.0, weights.1" if kind == "core" else "one of shape (30, 50), one of shape (50,)"
    for how, cause in FAILURES.items():
        failing = Failing(how)
        model = hooked(kind, failing.remember, bucket_cap_mb=25)
        told = told_by(functools.partial(step, model, integers(0)[rank]))
        assert f"rank {rank}, bucket 0 (parameters {parameters}, " in told.text, how
        assert "hook Failing.hook failed: " in told.text and cause in told.text, how
        assert failing.all_restored() and len(failing.kept) == 1, how
        at_once = how in ("None", "raises")
        assert told.error == ("CompressorError" if at_once else "RuntimeError"), how


@on_ranks(1)
@both_ddps
def test_a_state_or_a_compressor_in_the_wrong_place_is_told_what_to_write(rank: int, kind: str) -> None:
    """When it is registered, or at the first bucket."""
    powersgd = PowerSGD(rank=4)
    # All that PyTorch says of a class: it has no argument of this name.
    of_a_class = "attach a compressor with commhooks.attach" if kind == "core" else "'bucket'"
    no_hooks: list[tuple[Any, str]] = [
        (powersgd, f'write commhooks.attach(model, "{powersgd}") in place of'),
        (PowerSGD, of_a_class),
    ]
    for hook, words in no_hooks:
        told = told_by(functools.partial(hooked, kind, hook))
        assert words in told.text, told
    write = "write model.register_comm_hook(commhooks.PowerSGDState(process_group=None, matrix_approximation_rank=4), "
    for state, registered, words in (
        (None, commhooks.powerSGD_hook, f"{write}powerSGD_hook)"),
        (powersgd, commhooks.batched_powerSGD_hook, f"(got {powersgd}); {write}batched_powerSGD_hook)"),
        (None, commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook), f"(got None); {write}powerSGD_hook)"),
    ):
        model = hooked(kind, registered, state)
        with pytest.raises(HookTypeError, match=re.escape(words)):
            step(model, integers(0)[rank])


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        *((hook, "6_compress_wrapper: expected a hook, a callable that takes") for hook in (None, "allreduce_hook")),
        (PowerSGD, r"a compressor\); write commhooks.attach\(model, commhooks.compressors.PowerSGD"),
        (PowerSGD(rank=4), r"a compressor\); write commhooks.attach\(model, \"powersgd:"),
    ],
    ids=str,
)
def test_a_wrapper_round_what_is_no_hook_is_refused_at_once(hook: Any, words: str) -> None:
    for wrapper in WRAPPERS.values():
        with pytest.raises(HookTypeError, match=words):
            wrapper(hook)


def test_a_wrapper_refuses_integer_gradients() -> None:
    bucket: Any = SimpleNamespace(
        index=lambda: 3, buffer=lambda: torch.arange(4), parameters=lambda: [torch.ones(4)] * 10
    )
    with pytest.raises(GradientError, match=r"bucket 3 .* and 2 more\): hook plain: .* torch\.int64; a"):
        commhooks.fp16_compress_wrapper(plain)(None, bucket)


def test_a_wrapped_hook_is_forgotten_with_its_last_reference() -> None:
    before = len(default_hooks.on_wire)
    wrapped = commhooks.fp16_compress_wrapper(commhooks.allreduce_hook)
    assert len(default_hooks.on_wire) == before + 1
    assert wrapped.__qualname__ == "fp16_compress_wrapper(allreduce_hook)"
    del wrapped
    gc.collect()
    assert len(default_hooks.on_wire) == before


test = facts.tests()
