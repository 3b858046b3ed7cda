"""What can be known of CUDA without a device: PyTorch's fake tensors have its devices and dtypes, and no values.

A fake tensor raises where a value is asked for, which is where the host would wait for the device.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import BucketView, Context, Slot, StepVerdict, run_lockstep, streams
from commhooks.language.compressor import Result
from commhooks.language.randomness import seeded_normal
from commhooks.scheduling.ledger import Ledger, Traffic
from commhooks.state.table import RESIDUAL_STORAGES, StateTable
from tests.cases import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

# A PyTorch that is not built for CUDA cannot take a slice of a fake CUDA tensor, which low-rank compressors need.
CAN_BE_FAKED = [case for case in CASES if torch.backends.cuda.is_built() or not case.name.startswith("powersgd")]
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


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Make every tensor a fake one, and give a device that is not there."""
    never_done = types.SimpleNamespace(query=bool, synchronize=int)
    queue = mock.patch.object(streams, "_queue", side_effect=lambda kept, value: (kept.copy_(value), never_done)[1])
    kept = mock.patch.object(streams, "keep_until_read")
    place = mock.patch.object(streams, "_place", side_effect=id)
    with FakeTensorMode(), queue, kept, place:
        yield torch.device("cuda", 0)


@pytest.mark.parametrize("storage", RESIDUAL_STORAGES)
@pytest.mark.parametrize("case", CAN_BE_FAKED, ids=lambda case: case.name)
def test_a_step_on_a_gpu_asks_for_no_value(case: Case, storage: str, device: torch.device) -> None:
    table, compressor = StateTable(storage), case.make()
    parameters = [torch.empty(shape, device=device) for shape in SHAPES]
    table.bind((f"weights.{number}", parameter) for number, parameter in enumerate(parameters))
    memory = torch.empty(sum(parameter.numel() for parameter in parameters), device=device)
    sizes = [parameter.numel() for parameter in parameters]
    slots = [Slot(p, part, table.of(p)) for p, part in zip(parameters, memory.split(sizes), strict=True)]
    view = BucketView(0, memory, slots)
    for step in range(3):
        result: Result = run_lockstep([compressor.compress(view, Context(0, 1, step, StepVerdict()))])[0]
        assert (result.mean.device, result.mean.shape) == (device, memory.shape)


def test_random_numbers_are_copied_without_waiting(device: torch.device) -> None:
    like = torch.empty(1, device=device)
    with Recorded() as recorded:
        assert seeded_normal((2, 3), 1, like).device == device
    copies = [settings for name, settings in recorded.settings if "copy" in name]
    assert [settings.get("non_blocking") for settings in copies] == [True]
    assert any(settings.get("pin_memory") for _, settings in recorded.settings)


def test_statistics_say_whose_seconds_they_are(device: torch.device) -> None:
    ledger = Ledger()
    for memory in (torch.empty(3), torch.empty(3, device=device)):
        task: Any = mock.Mock(memory=memory, seconds_compressing=0.0, handed_in=0.0, is_last=True, asked=[])
        ledger.enter(task, Traffic())
    assert (ledger.totals(None).buckets, ledger.totals(None).buckets_on_gpu) == (2, 1)
    assert ledger.last_step().buckets_on_gpu == 1
