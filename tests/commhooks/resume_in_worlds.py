"""What the tests of resuming run on every rank: half a run in some processes, the other half in new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import commhooks
from commhooks import Attachment, Compressor, PowerSGDState, StartAfter
from tests.cases import CASES, Case
from tests.commhooks.mirrored import largest_error
from tests.commhooks.models import wrap
from tests.commhooks.resuming import Run, distance, network

EXCHANGING = [case for case in CASES if case.exchanges]  # without an exchange ranks part, and have no common model
SMALL_BUCKETS = 0.004


def begin(
    kind: str,
    policy: str,
    compressor: Compressor,
    bucket_cap_mb: float = SMALL_BUCKETS,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Run:
    ddp = wrap(kind, network().to(dtype), bucket_cap_mb=bucket_cap_mb, **settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    return Run(ddp, optimizer, commhooks.attach(ddp, compressor, policy=policy))


def late(case: Case) -> Compressor:
    """Let the case's compressor begin in the fifth step, so that halves of a run may lie before and after it."""
    return StartAfter(inner=case.make(), steps=4)


def saved_and_whole(
    rank: int,
    kind: str,
    policy: str,
    folder: str,
    steps: int,
    cases: list[str],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train every case for `steps` steps, save, and train for as many again; keep the results."""
    for case in _chosen(cases):
        run = begin(kind, policy, case.make(), dtype=dtype)
        run.train(rank, 0, steps)
        commhooks.save_checkpoint(Path(folder) / case.name, step=steps, model=run.ddp, optimizer=run.optimizer,
                                  hooks=run.hooks)  # fmt: skip
        run.train(rank, steps, 2 * steps)
        torch.save(run.result(), Path(folder) / f"{case.name}.{rank}.whole")
        _end(run)


def resumed(rank: int, kind: str, policy: str, folder: str, steps: int, cases: list[str]) -> dict[str, float]:
    """Load every case in a new process, train the second half, and return how far it is from the whole run's end."""
    distances = {}
    for case in _chosen(cases):
        run = begin(kind, policy, case.make())
        loaded = _load(run, Path(folder) / case.name)
        assert loaded is not None and loaded.step == steps and _steps_of(run) == steps
        run.train(rank, steps, 2 * steps)
        distances[case.name] = distance(run.result(), torch.load(Path(folder) / f"{case.name}.{rank}.whole"))
        _end(run)
    return distances


def first_resumed_steps(
    rank: int, kind: str, policy: str, folder: str, steps: int, cases: list[str], bucket_cap_mb: float
) -> dict[str, float]:
    """Load every case, run two steps, and return how far what the second changed is from what the same buckets change.

    Relative to the largest change of any element, in float64. In the first step buckets are still cut as they were.
    """
    distances = {}
    for case in _chosen(cases):
        changes = []
        for cap in (SMALL_BUCKETS, bucket_cap_mb):
            run = begin(kind, policy, case.make(), cap, torch.float64)
            _load(run, Path(folder) / case.name)
            changes.append(run.train(rank, steps, steps + 2))
            _end(run)
        largest = max(float(change.abs().max()) for change in changes[0])
        distances[case.name] = largest_error(*changes) / largest
    return distances


def resumed_in_place(rank: int, kind: str, folder: str) -> dict[str, float]:
    """Save runs whose last step's buckets are known in a roundabout way, and return how far the resumed ones come out.

    The compressor makes one matrix of a bucket, so that it shows at once if the first step's are cut otherwise.
    """
    whole = commhooks.make_compressor("powersgd", rank=2, matrices="whole-bucket")
    distances = {}
    for what, cap in (
        ("replaced", SMALL_BUCKETS),
        ("loaded and saved again", SMALL_BUCKETS),
        ("one bucket", 25.0),
        ("static graph", SMALL_BUCKETS),
    ):
        path = Path(folder) / what
        static: dict[str, Any] = {"static_graph": what == "static graph"}
        run = begin(
            kind, "fifo", commhooks.make_compressor("powersgd", rank=1) if what == "replaced" else whole, cap, **static
        )
        run.train(rank, 0, 3)
        if isinstance(run.hooks, Attachment) and what == "replaced":
            run.hooks.replace(whole)
        _save(run, path)
        if what == "loaded and saved again":
            between = begin(kind, "fifo", whole, cap, **static)
            _load(between, path)
            path = path / "again"
            _save(between, path)
            _end(between)
        resumed = begin(kind, "fifo", whole, cap, **static)
        _load(resumed, path)
        for one in (run, resumed):
            torch.manual_seed(0)  # dropout
            one.train(rank, 3, 6)
        distances[what] = distance(resumed.result(), run.result())
        _end(run)
        _end(resumed)
    return distances


class Turning(nn.Module):
    """A model with a complex parameter and a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn = nn.Parameter(torch.randn(8, 12, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(12))

    def forward(self, inputs: Tensor) -> Tensor:
        turned = self.turn @ (inputs * self.scale).to(torch.complex64)
        return torch.as_tensor((turned.abs() ** 2).mean())


def resumed_complex(rank: int, kind: str) -> float:
    """Resume where a gradient is complex, and fp16 rounds it; return the distance from the run that went on."""
    runs = [wrap(kind, Turning()) for _ in range(2)]
    hooks = [commhooks.attach(ddp, commhooks.make_compressor("fp16", error_feedback=True)) for ddp in runs]
    for step in range(6):
        if step == 3:
            hooks[1].load_state_dict(hooks[0].state_dict())
        for ddp in runs if step >= 3 else runs[:1]:
            ddp.zero_grad()
            ddp(torch.randn(12, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
    gradients = [[p.grad.clone() for p in ddp.parameters() if p.grad is not None] for ddp in runs]
    return distance(*gradients) + distance(hooks[0].state_dict()["local"], hooks[1].state_dict()["local"])


def resumed_hook(rank: int, kind: str, folder: str) -> dict[str, float]:
    """Load checkpoints of hooks that decide by themselves in what form their state compresses; return distances."""
    hooks: dict[str, Any] = {
        "powerSGD_hook": commhooks.powerSGD_hook,
        "batched_powerSGD_hook": commhooks.batched_powerSGD_hook,
        "on fp16": commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook),
    }
    distances = {}
    for name, hook in hooks.items():
        runs = []
        for _ in range(2):
            ddp: Any = wrap(kind, network(), bucket_cap_mb=SMALL_BUCKETS)
            state = PowerSGDState(None, 2, start_powerSGD_iter=1)
            state.bind(ddp)
            ddp.register_comm_hook(state, hook)
            runs.append(Run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9), state))
        whole, resumed = runs
        whole.train(rank, 0, 3)
        _save(whole, Path(folder) / name)
        _load(resumed, Path(folder) / name)
        for run in runs:
            torch.manual_seed(0)  # dropout
            run.train(rank, 3, 6)
        distances[name] = distance(resumed.result(), whole.result())
    return distances


def _chosen(cases: list[str]) -> list[Case]:
    return [case for case in EXCHANGING if not cases or case.name in cases]


def _save(run: Run, path: Path) -> None:
    commhooks.save_checkpoint(path, step=_steps_of(run), model=run.ddp, optimizer=run.optimizer, hooks=run.hooks)


def _load(run: Run, path: Path) -> commhooks.Checkpoint | None:
    return commhooks.load_checkpoint(path, model=run.ddp, optimizer=run.optimizer, hooks=run.hooks)


def _steps_of(run: Run) -> int:
    return run.hooks.steps if isinstance(run.hooks, Attachment) else run.hooks.iter


def _end(run: Run) -> None:
    if isinstance(run.hooks, Attachment):
        run.hooks.detach()
