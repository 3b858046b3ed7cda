"""What can be known of CUDA without a device: PyTorch's fake tensors have its devices and dtypes, and no values.

A fake tensor raises where a value is asked for, which is where the host would wait for the device.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import devices
from commhooks.communicators.collective import Traffic
from commhooks.compressors import TwoHop
from commhooks.engine import undo
from commhooks.language import BucketView, Compressor, Context
from commhooks.language.compressor import inner_of
from commhooks.language.randomness import seeded_normal
from commhooks.scheduling.ledger import Ledger
from commhooks.state.table import StateTable
from tests.cases import CASES, Case, is_form, is_whole
from tests.commhooks.alone import bucket_of, run_alone
from tests.tiers import in_turn, thorough

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

SHAPES = [(30, 50), (50,), (40, 30), (), (7,)]


class Recorded(TorchDispatchMode):
    """Note the settings of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # 'Call to untyped function "__init__"'
        self.settings: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.settings.append((str(function), kwargs or {}))
        return function(*args, **(kwargs or {}))


class Blocking(TorchDispatchMode):
    """Note the copies between devices for which the host waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # 'Call to untyped function "__init__"'
        self.copies: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if function is torch.ops.aten._to_copy.default else args[1]
            waits = not (kwargs or {}).get("non_blocking") and not args[2:]
            if result.device != source.device and waits:
                self.copies.append(f"{function} of {tuple(source.shape)}: {source.device} to {result.device}")
        return result


class Deviceless(TorchFunctionMode):
    """Go around those methods that look for the device before they do anything, in a PyTorch not built for CUDA."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        if function is Tensor.contiguous:
            return torch.ops.aten.contiguous(*args)
        if function is Tensor.__invert__:
            return torch.ops.aten.bitwise_not(*args)
        if function is Tensor.__getitem__:
            return _item(*args)
        if function is Tensor.__setitem__:
            tensor, index, value = args
            place = _item(tensor, index)
            return torch.ops.aten.copy_(place, value) if isinstance(value, Tensor) else place.fill_(value)
        settings = dict(kwargs or {})
        if function is torch.rand:
            settings.pop("generator")  # of the processor, for want of another
        out = settings.pop("out", None)
        result = function(*args, **settings)
        return result if out is None else torch.ops.aten.copy_(out, result)


def _item(tensor: Tensor, index: Any) -> Tensor:
    """Return `tensor[index]`, a copy if there is a tensor in the index: what is written there is lost, as any value."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        (place,) = (number for number, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (tensor.dim() - len(parts) + 1)
    if all(isinstance(part, Tensor) for part in parts) and len(parts) > 1:  # pairs of indices
        return torch.ops.aten.index.Tensor(tensor, parts)  # type: ignore[no-any-return]  # 'Returning Any'
    dimension = 0
    for part in parts:
        if isinstance(part, int):
            tensor = tensor.select(dimension, part)
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dimension, part.start, part.stop, part.step or 1)
            dimension += 1
        else:
            where = torch.as_tensor(part, device=tensor.device)
            tensor = torch.ops.aten.index.Tensor(tensor, [*[None] * dimension, where])
            dimension += where.dim()
    return tensor


@functools.cache
def _count_blocks() -> None:
    """Let two-hop compressors count the bytes of a block's code, which they do once, with real numbers."""
    waiting: list[Compressor] = [case.make() for case in CASES]
    while waiting:
        compressor = waiting.pop()
        waiting += inner_of(compressor)
        if isinstance(compressor, TwoHop):
            compressor.pays(10_000, 1)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Make every tensor a fake one, and give a device that is not there."""
    _count_blocks()

    def queued(kept: Tensor, value: Tensor) -> Any:
        kept.copy_(value, non_blocking=True)
        return types.SimpleNamespace(query=bool, synchronize=int)  # never done

    queue = mock.patch.object(devices, "_queue", side_effect=queued)
    kept = mock.patch.object(undo, "keep_until_read")
    mark = mock.patch.object(undo, "mark_of", return_value=None)
    place = mock.patch.object(devices, "place_of", side_effect=id)
    of_cpu = torch.Generator
    generators = mock.patch.object(torch, "Generator", side_effect=lambda *device: of_cpu())
    with FakeTensorMode(), Deviceless(), queue, kept, mark, place, generators:
        yield torch.device("cuda", 0)


STORAGES = ["fp32", "bf16", "host"]
OTHERS = thorough([(case, "fp32") for case in CASES if not is_whole(case)])


@pytest.mark.parametrize(
    ("case", "storage"),
    [*in_turn([case for case in CASES if is_whole(case)], STORAGES, fast=is_form), *OTHERS],
    ids=str,
)
def test_a_step_on_a_gpu_asks_for_no_value(case: Case, storage: Any, device: torch.device) -> None:
    compressor = case.make()
    parameters = [torch.empty(shape, device=device) for shape in SHAPES]
    memory = torch.empty(sum(parameter.numel() for parameter in parameters), device=device)
    view = bucket_of(parameters, memory, StateTable(0, 1, storage), compressor)
    log = undo.UndoLog()
    for step in range(3):
        log.begin_step()
        log.expect(last=True)
        with Blocking() as blocking:
            mean = run_alone(view, log.watch(view, compressor.compress(view, Context(0, 1, step))))
            log.settle(mean)
        assert (mean.device, mean.shape) == (device, memory.shape)
    assert blocking.copies == [], "in a step after the first"


def test_random_numbers_are_copied_without_waiting(device: torch.device) -> None:
    like = torch.empty(1, device=device)
    with Recorded() as recorded, Blocking() as blocking:
        assert seeded_normal((2, 3), 1, like).device == device
    assert blocking.copies == []
    assert any(settings.get("pin_memory") for _, settings in recorded.settings)


def test_statistics_say_whose_seconds_they_are(device: torch.device) -> None:
    ledger = Ledger()
    for memory in (torch.empty(3), torch.empty(3, device=device)):
        task: Any = mock.Mock(
            bucket=BucketView(0, memory), seconds_compressing=0.0, submitted=0.0, is_last=True, asked=[]
        )
        ledger.enter(task, Traffic())
    assert (ledger.totals(None).buckets, ledger.totals(None).buckets_on_gpu) == (2, 1)
    assert ledger.last_step().buckets_on_gpu == 1
