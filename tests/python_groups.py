"""Process groups written in Python, as torchft's are: of one rank, and around a Gloo group of any size."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # 'has no attribute': not in its stub
from torch.distributed.distributed_c10d import _get_default_store
from torch.futures import Future

WORKS = ("subclass", "wrapper", "wait alone", "future alone", "elsewhere", "later")
"""Ways in which a group hands its results over; see `Lonely`."""


class Done(dist.Work):
    """A work that was done from the start; its ``wait`` insists on the timeout that C++ passes."""

    def __init__(self, result: Any, calls: Counter[str]) -> None:
        super().__init__()
        self._result = result
        self._calls = calls

    def wait(self, timeout: timedelta) -> bool:  # type: ignore[override]  # 'Signature incompatible': no default
        self._calls["wait"] += 1
        return True

    def get_future(self) -> Future[Any]:
        self._calls["get_future"] += 1
        return _completed(self._result)


class WaitAlone(dist.Work):
    """A work without a future, which sums only when it is waited for, and returns nothing."""

    def __init__(self, tensors: list[Tensor], calls: Counter[str]) -> None:
        super().__init__()
        self._tensors = tensors
        self._kept = [tensor.clone() for tensor in tensors]
        self._calls = calls
        for tensor in tensors:
            tensor.fill_(-1)

    def wait(self, timeout: timedelta) -> None:  # type: ignore[override]  # 'Return type "None" of "wait" incompatible'
        self._calls["wait"] += 1
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)


class FutureAlone(dist.Work):
    """A work that tells its end by its future and by nothing else."""

    def __init__(self, result: Any, calls: Counter[str]) -> None:
        super().__init__()
        self._result = result
        self._calls = calls

    def get_future(self) -> Future[Any]:
        self._calls["get_future"] += 1
        return _completed(self._result)


class Later(Done):
    """A work whose ``wait`` returns before its result, which is in its future alone, is there."""

    def __init__(self, result: Any, calls: Counter[str]) -> None:
        super().__init__(result, calls)
        self._future: Future[Any] = torch.futures.Future()
        threading.Timer(0.02, self._future.set_result, [result]).start()

    def get_future(self) -> Future[Any]:
        self._calls["get_future"] += 1
        return self._future


class Lonely(dist.ProcessGroup):
    """A group of one rank that `torch.distributed` knows nothing of.

    ``works``: "subclass" hands out works of a Python class, "wrapper" such as C++ makes of a future, "wait alone" and
    "future alone" works that have nothing else; "elsewhere" leaves a dense all-reduce's result in the future alone, and
    "later" completes that future only after ``wait`` has returned.
    """

    def __init__(self, works: str = "subclass") -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # 'Missing "store"': the stub has one constructor of two
        self.works = works
        self.calls: Counter[str] = Counter()

    def _work(self, result: Any, tensors: list[Tensor]) -> dist.Work:
        if self.works == "wrapper":
            work: dist.Work = _create_work_from_future(_completed(result))
            return work
        if self.works == "wait alone":
            return WaitAlone(tensors, self.calls)
        kinds = {"future alone": FutureAlone, "later": Later}
        return kinds.get(self.works, Done)(result, self.calls)

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible'
        self.calls["allreduce"] += 1
        result = tensors
        if self.works in ("elsewhere", "later") and tensors[0].is_floating_point():
            result = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.fill_(-1)
        return self._work(result, tensors)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible'
        self.calls["broadcast"] += 1
        return self._work(tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible'
        self.calls["allgather"] += 1
        outputs[0][0].copy_(inputs[0])
        return self._work(outputs, outputs[0])

    def getBackendName(self) -> str:  # noqa: N802
        return "lonely"


class Passing(dist.Work):
    """A work around another, which is waited for when this one is."""

    def __init__(self, inner: dist.Work, calls: Counter[str]) -> None:
        super().__init__()
        self._inner = inner
        self._calls = calls

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._calls["wait"] += 1
        return self._inner.wait()

    def get_future(self) -> Any:
        return self._inner.get_future()


class Around(dist.ProcessGroup):
    """A group that passes everything on to a Gloo group, and counts it."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # 'Missing "store"', as above
        self.inner = inner
        self.calls: Counter[str] = Counter()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible'
        return self._pass_on("allreduce", tensors, options)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible'
        return self._pass_on("broadcast", tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible'
        return self._pass_on("allgather", outputs, inputs, options)

    def _pass_on(self, name: str, *arguments: Any) -> dist.Work:
        self.calls[name] += 1
        return Passing(getattr(self.inner, name)(*arguments), self.calls)

    def getBackendName(self) -> str:  # noqa: N802
        return "around"


class Boastful(Lonely):
    """A group of other ranks than `torch.distributed` made it for, as a manager's is."""

    def getRank(self) -> int:  # noqa: N802
        return 12

    def getSize(self) -> int:  # noqa: N802
        return 34


class Elastic(Lonely):
    """A group whose ranks come and go, as those of PyTorch 2.14 that can be reconfigured, and meet in one store."""

    group_name = "elastic"  # type: ignore[assignment]  # a property of the base

    def __init__(self, members: list[int]) -> None:
        super().__init__()
        self.members = members

    def getRank(self) -> int:  # noqa: N802
        return self.members.index(dist.get_rank())

    def getSize(self) -> int:  # noqa: N802
        return len(self.members)

    def get_group_store(self) -> Any:
        return _get_default_store()


def made_by_torch(kind: str) -> Any:
    """Return a new group of all ranks, of one of the kinds below, that `torch.distributed` knows."""
    _register()
    return dist.new_group(backend=kind)


@functools.cache
def _register() -> None:
    makers: dict[str, Any] = {
        "boastful": lambda *_: Boastful(),
        "around": lambda *_: Around(_world()),
    }
    for kind, maker in makers.items():
        dist.Backend.register_backend(kind, maker, devices=["cpu"])


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "init_process_group comes first"
    return dist.group.WORLD


def _completed(result: Any) -> Future[Any]:
    future: Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future
