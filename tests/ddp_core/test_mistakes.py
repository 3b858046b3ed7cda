"""What cannot work is refused in words, early, and on every rank."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from ddp_core import DistributedDataParallel
from tests.commhooks.models import torchs_takes
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import grads, ones, scale, wrap

facts = Facts()


def delaying(by: Any, *named: tuple[str, Any]) -> dict[str, Any]:
    return {"delay_all_reduce_named_params": list(named), "param_to_hook_all_reduce": by}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (
            lambda: scale().requires_grad_(False),
            {},
            RuntimeError,
            "doesn't have any parameter that requires",
        ),
        (lambda: nn.LazyLinear(3), {}, RuntimeError, r"uninitialized.*'weight'.*dummy forward"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            {},
            ValueError,
            r"same type of devices.*cpu and meta.*module\.to\(device\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            {},
            ValueError,
            "SyncBatchNorm layers only work with GPU modules",
        ),
        (scale, {"device_ids": [0]}, ValueError, r"only work with.*GPU modules.*device_ids \[0\]"),
        (scale, {"device_ids": [0, 1]}, ValueError, r"contain a single element.*\[0, 1\]"),
        (scale, {"output_device": 1}, ValueError, "only work with.*output_device 1"),
        (scale, {"bucket_cap_mb": 0}, ValueError, r"bucket_cap_mb must be a positive number of MiB \(got 0\)"),
        (scale, {"bucket_cap_mb_list": [1, 0]}, ValueError, "must be a positive number"),
        (scale, {"process_group": 3}, ValueError, r"process_group must be.*\(got 3\)"),
        (scale, {"mixed_precision": object()}, NotImplementedError, r"torch\.autocast.*register_comm_hook"),
        (scale, {"delay_all_reduce_named_params": []}, ValueError, "need to be set at the same time"),
        (scale, delaying(nn.Parameter(requires_grad=False)), ValueError, "that requires a gradient .got one of shape"),
        (scale, delaying("weight"), ValueError, r"param_to_hook_all_reduce must be.*\(got 'weight'\)"),
        (
            scale,
            delaying(nn.Parameter(), ("module.weight", nn.Parameter())),
            ValueError,
            r"'module\.weight' must come with the parameter of that name.*before wrapping",
        ),
    ],
)
def test_what_cannot_be_wrapped(
    make: Callable[[], nn.Module], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wrap(make(), **options)


of_the_newest = pytest.mark.skipif(not torchs_takes("forward_sync_buffers"), reason="older, with fewer arguments")


@of_the_newest
def test_the_arguments_are_those_of_pytorchs_class() -> None:
    theirs, ours = (
        [(parameter.name, parameter.default) for parameter in inspect.signature(ddp).parameters.values()]
        for ddp in (nn.parallel.DistributedDataParallel, DistributedDataParallel)
    )
    names = {name for name, _ in theirs}
    assert [one for one in ours if one[0] in names] == theirs
    public = {name for name in dir(nn.parallel.DistributedDataParallel) if not name.startswith("_")}
    assert public - {*dir(DistributedDataParallel)} <= {"broadcast_buffers", "gather", "scatter", "to_kwargs"}


@of_the_newest
@pytest.mark.usefixtures("alone")
def test_every_argument_of_pytorchs_class_is_accepted_but_mixed_precision() -> None:
    """Each with another value than its default, where one makes sense on the CPU."""
    model = nn.Sequential(scale(), scale())
    on = ("find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph", "batched_grad_copy")
    off = ("broadcast_buffers", "init_sync", "forward_sync_buffers")
    values: dict[str, Any] = {
        **dict.fromkeys((*on, "skip_all_reduce_unused_params", "lazy_bucket_allocation"), True),
        **dict.fromkeys(off, False),
        "device_ids": [],
        "output_device": None,
        "dim": 1,
        "process_group": dist.group.WORLD,
        "device_mesh": dist.device_mesh.init_device_mesh("cpu", (1,)),
        "bucket_cap_mb": 1,
        "bucket_cap_mb_list": [1, 2],
    }
    delayed = delaying(model[1].weight, ("0.weight", model[0].weight))
    every = inspect.signature(DistributedDataParallel).parameters.keys()
    assert values.keys() | delayed.keys() | {"module", "mixed_precision"} == every
    for options in (delayed, *({name: value} for name, value in values.items())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers and check_reduction are deprecated
            ddp = wrap(model, **options)
        ddp.zero_grad()
        ddp(ones()).sum().backward()
        assert all(gradient is not None for gradient in grads(model))


def test_a_process_group_that_is_not_initialised() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        wrap(scale())


def annotated_bucket(state: object, bucket: int) -> Future[Tensor]:
    raise AssertionError("never called")


def annotated_return(state: object, bucket: object) -> list[int]:
    raise AssertionError("never called")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("hook", "error", "words"),
    [
        (1, TypeError, r"must be callable\. \(got int\)"),
        (lambda bucket: bucket, TypeError, r"must take \(state, bucket\)"),
        (lambda state, bucket, more: bucket, TypeError, r"must take \(state, bucket\)"),
        (functools.partial(annotated_bucket, None, 1), TypeError, r"must take \(state, bucket\)"),
        (annotated_bucket, ValueError, r"bucket annotation should be dist\.GradBucket.*int"),
        (annotated_return, ValueError, r"return annotation should be torch\.futures\.Future.*list\[int\]"),
    ],
)
def test_what_cannot_be_a_hook(hook: Any, error: type[Exception], words: str) -> None:
    ddp = wrap(scale())
    with pytest.raises(error, match=words):
        ddp.register_comm_hook(None, hook)
    ddp(ones()).sum().backward()  # the refused hook left nothing behind


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def coroutine(state: object, bucket: Any) -> Any:
    async def later() -> Any:
        return bucket.buffer()

    unawaited = later()
    unawaited.close()
    return unawaited


WRONG = {
    "None": (lambda state, bucket: None, "got NoneType"),
    "iterator": (lambda state, bucket: iter(bucket.names()), "got list_iterator"),
    "wrong size": (lambda state, bucket: torch.ones(5), r"expected a tensor.*got shape \(5,\)"),
    "future None": (lambda state, bucket: done(None), "got NoneType"),
    "future of a future": (lambda state, bucket: done(done(bucket.buffer())), "got Future"),
    "future list of two": (lambda state, bucket: done([bucket.buffer()] * 2), "got list"),
    "complex": (lambda state, bucket: torch.ones(1) * 1j, "got .*complex64"),
    "sparse": (lambda state, bucket: torch.ones(1).to_sparse(), "got .*sparse_coo"),
    "elsewhere": (lambda state, bucket: torch.ones(1, device="meta"), "got .*meta"),
    "coroutine": (coroutine, "got coroutine"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_return_names_hook_bucket_and_parameters(name: str) -> None:
    hook, words = WRONG[name]
    ddp = wrap(scale())
    ddp.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=rf"(?s)communication hook '[a-z<>]+', bucket 0 \(weight\): .*{words}"):
        ddp(ones()).sum().backward()


@pytest.mark.usefixtures("alone")
def test_a_hook_cannot_change_while_gradients_are_being_reduced() -> None:
    ddp = wrap(nn.Sequential(scale(), scale()))
    handle = ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    refusals = []

    def meddle(grad: Tensor) -> None:
        for change in (lambda: ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer()), handle.remove):
            with pytest.raises(RuntimeError, match="are being reduced.*between the end of one") as caught:
                change()
            refusals.append(caught)

    ddp.module[0].weight.register_hook(meddle)  # the last gradient; by then the other has been counted
    ddp(ones()).sum().backward()
    assert len(refusals) == 2


DTYPES, FORMATS = (torch.float32, torch.float64), (torch.contiguous_format, torch.channels_last)

OTHER_ON_RANK_1: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "number of parameters": (
        lambda rank: nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank))),
        r"Rank 0 has 2 params.*rank 1 has inconsistent 4.*1\.weight",
    ),
    "shape": (
        lambda rank: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank)),
        r"\[1\].*'1\.weight'.*\(4, 2\).*not to match.*\(3, 2\)",
    ),
    "strides": (
        lambda rank: nn.Sequential(nn.Conv2d(2, 3, 3)).to(memory_format=FORMATS[rank]),  # type: ignore[call-overload]  # 'No overload variant of "to"': the stubs leave memory_format alone out
        r"\[1\].*'0\.weight'.*strides",
    ),
    "dtype": (lambda rank: scale().to(DTYPES[rank]), r"\[1\].*'weight'.*torch\.float64.*torch\.float32"),
    "frozen parameter": (
        lambda rank: nn.Sequential(scale(), scale().requires_grad_(rank == 0)),
        r"1\.weight",
    ),
    "shape of a frozen parameter": (
        lambda rank: nn.Sequential(nn.Linear(2, 2 + rank).requires_grad_(False), nn.Linear(2, 2)),
        r"0\.weight",
    ),
    "shape of a buffer": (lambda rank: nn.Sequential(scale(), nn.BatchNorm1d(2 + rank, affine=False)), "running"),
    "dtype of a buffer": (
        lambda rank: nn.Sequential(scale(), nn.BatchNorm1d(2, affine=False).to(DTYPES[rank])),
        "running",
    ),
}


@facts
def what_rank_1_has_otherwise_is_named_on_every_rank(rank: int) -> None:
    for what, (made_on, words) in OTHER_ON_RANK_1.items():
        with pytest.raises(RuntimeError) as caught:
            wrap(made_on(rank))
        assert re.search(words, str(caught.value)), (what, str(caught.value))


@facts
def a_rank_outside_the_group_is_told_so(rank: int) -> None:
    group = dist.new_group([0])
    if rank == 0:
        wrap(scale(), process_group=group)(ones()).sum().backward()
        return
    with pytest.raises(ValueError, match="one that this rank belongs to"):
        wrap(scale(), process_group=group)


test_on_two_ranks = facts.tests()
