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


def frozen() -> nn.Module:
    return scale().requires_grad_(False)


def on_two_device_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (frozen, RuntimeError, "doesn't have any parameter that requires a gradient"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), RuntimeError, r"uninitialized.*'0\.weight'.*dummy forward"),
        (on_two_device_types, ValueError, r"same type of devices.*cpu and meta.*module\.to\(device\)"),
        (batch_normed, ValueError, "SyncBatchNorm layers only work with GPU modules"),
    ],
)
def test_a_module_that_cannot_be_wrapped(model: Callable[[], nn.Module], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        wrap(model())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device_ids": [0]}, ValueError, r"only work with.*GPU modules.*device_ids \[0\]"),
        ({"device_ids": [0, 1]}, ValueError, r"contain a single element.*\[0, 1\]"),
        ({"output_device": 1}, ValueError, "only work with.*output_device 1"),
        ({"bucket_cap_mb": 0}, ValueError, r"bucket_cap_mb must be a positive number of MiB \(got 0\)"),
        ({"bucket_cap_mb_list": [1, 0]}, ValueError, "must be a positive number"),
        ({"process_group": 3}, ValueError, r"process_group must be.*\(got 3\)"),
        ({"mixed_precision": object()}, NotImplementedError, r"torch\.autocast.*register_comm_hook"),
        ({"delay_all_reduce_named_params": []}, ValueError, "need to be set at the same time"),
        (
            {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": nn.Parameter(requires_grad=False)},
            ValueError,
            r"param_to_hook_all_reduce must be a parameter that requires a gradient \(got one of shape",
        ),
        (
            {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": "weight"},
            ValueError,
            r"param_to_hook_all_reduce must be.*\(got 'weight'\)",
        ),
        (
            {
                "delay_all_reduce_named_params": [("module.weight", nn.Parameter())],
                "param_to_hook_all_reduce": nn.Parameter(),
            },
            ValueError,
            r"'module\.weight' must come with the parameter of that name.*before wrapping",
        ),
        (
            {
                "delay_all_reduce_named_params": [("weight", nn.Parameter())],
                "param_to_hook_all_reduce": nn.Parameter(),
            },
            ValueError,
            "'weight' must come with the parameter of that name",
        ),
    ],
)
def test_an_argument_that_cannot_be_used(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        wrap(scale(), **options)


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
    values: dict[str, Any] = {
        "device_ids": [],
        "dim": 1,
        "broadcast_buffers": False,
        "init_sync": False,
        "process_group": dist.group.WORLD,
        "bucket_cap_mb": 1,
        "find_unused_parameters": True,
        "check_reduction": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "skip_all_reduce_unused_params": True,
        "bucket_cap_mb_list": [1, 2],
        "batched_grad_copy": True,
        "forward_sync_buffers": False,
        "lazy_bucket_allocation": True,
        "output_device": None,
        "device_mesh": dist.device_mesh.init_device_mesh("cpu", (1,)),
    }
    delaying = {
        "delay_all_reduce_named_params": [("0.weight", model[0].weight)],
        "param_to_hook_all_reduce": model[1].weight,
    }
    every = inspect.signature(DistributedDataParallel).parameters.keys()
    assert values.keys() | delaying.keys() | {"module", "mixed_precision"} == every
    for options in (delaying, *({name: value} for name, value in values.items())):
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


def returns_none(state: object, bucket: object) -> None:
    raise AssertionError("never called")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("hook", "error", "words"),
    [
        (1, TypeError, r"must be callable\. \(got int\)"),
        (None, TypeError, r"must be callable\. \(got NoneType\)"),
        (lambda bucket: bucket, TypeError, r"must take \(state, bucket\)"),
        (lambda state, bucket, more: bucket, TypeError, r"must take \(state, bucket\)"),
        (lambda state, *, bucket: bucket, TypeError, r"must take \(state, bucket\)"),
        (functools.partial(annotated_bucket, None, 1), TypeError, r"must take \(state, bucket\)"),
        (annotated_bucket, ValueError, r"bucket annotation should be dist\.GradBucket.*int"),
        (annotated_return, ValueError, r"return annotation should be torch\.futures\.Future.*list\[int\]"),
        (returns_none, ValueError, "return annotation should be"),
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
    "int": (lambda state, bucket: 3, "got int"),
    "iterator": (lambda state, bucket: iter(bucket.names()), "got list_iterator"),
    "wrong size": (lambda state, bucket: torch.ones(5), r"expected a tensor.*got shape \(5,\)"),
    "future None": (lambda state, bucket: done(None), "got NoneType"),
    "future int": (lambda state, bucket: done(7), "got int"),
    "future of a future": (lambda state, bucket: done(done(bucket.buffer())), "got Future"),
    "future wrong size": (lambda state, bucket: done(torch.ones(0)), r"\(0,\)"),
    "future list of two": (lambda state, bucket: done([bucket.buffer()] * 2), "got list"),
    "future empty list": (lambda state, bucket: done([]), "got list"),
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


def channels_last_on_rank_1(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 3, 3))
    return model.to(memory_format=torch.channels_last) if rank else model  # type: ignore[call-overload]  # 'No overload variant of "to"': the stubs leave memory_format alone out


def bias_frozen_on_rank_1(rank: int) -> nn.Module:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(rank == 0)
    return model


def with_buffer(buffer: Tensor) -> nn.Module:
    model = scale()
    model.register_buffer("running", buffer)
    return model


OTHER_ON_RANK_1: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "number of parameters": (
        lambda rank: nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank))),
        r"Rank 0 has 2 params.*rank 1 has inconsistent 4.*1\.weight",
    ),
    "shape": (
        lambda rank: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank)),
        r"\[1\].*'1\.weight'.*\(4, 2\).*not to match.*\(3, 2\)",
    ),
    "strides": (channels_last_on_rank_1, r"\[1\].*'0\.weight'.*strides"),
    "dtype": (
        lambda rank: scale().to([torch.float32, torch.float64][rank]),
        r"\[1\].*'weight'.*torch\.float64.*torch\.float32",
    ),
    "frozen parameter": (bias_frozen_on_rank_1, "bias"),
    "shape of a frozen parameter": (
        lambda rank: nn.Sequential(nn.Linear(2, 2 + rank).requires_grad_(False), nn.Linear(2, 2)),
        r"0\.weight",
    ),
    "shape of a buffer": (lambda rank: with_buffer(torch.zeros(2 + rank)), "running"),
    "dtype of a buffer": (lambda rank: with_buffer(torch.zeros(2).to([torch.float32, torch.float64][rank])), "running"),
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
