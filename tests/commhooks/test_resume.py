"""A run that was saved, ended and resumed by new processes is the one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks import Compressor, Handle, PowerSGDState
from tests import bounds
from tests.cases import CASES, EACH_FORM_ONCE, FORMS, Case
from tests.commhooks.mirrored import largest_error
from tests.commhooks.models import wrap
from tests.commhooks.resuming import Run, distance, network
from tests.ddp_core.facts import BOTH_DDPS, Facts
from tests.tiers import THOROUGH, thorough
from tests.world import on_ranks, run_world
from tests.world.launcher import HANG_SECONDS

facts = Facts(kinds=BOTH_DDPS)
pytestmark = pytest.mark.kernels
EXCHANGING = [case for case in CASES if case.exchanges]  # without an exchange ranks part, and have no common model
SMALL_BUCKETS = 0.004


def begin(
    kind: str,
    policy: Any,
    compressor: Compressor,
    bucket_cap_mb: float = SMALL_BUCKETS,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Run:
    ddp = wrap(kind, network().to(dtype), bucket_cap_mb=bucket_cap_mb, **settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    return Run(ddp, optimizer, commhooks.attach(ddp, compressor, policy=policy))


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
                                  hooks=run.hooks, flush=False)  # fmt: skip
        run.train(rank, steps, 2 * steps)
        torch.save(run.result(), Path(folder) / f"{case.name}.{rank}.whole")
        _end(run)


def resumed(rank: int, kind: str, policy: str, folder: str, steps: int, cases: list[str]) -> None:
    """Load every case in a new process, and train the second half: it ends where the whole run does."""
    for case in _chosen(cases):
        run = begin(kind, policy, case.make())
        loaded = _load(run, Path(folder) / case.name)
        assert loaded is not None and loaded.step == steps and _steps_of(run) == steps
        run.train(rank, steps, 2 * steps)
        assert distance(run.result(), torch.load(Path(folder) / f"{case.name}.{rank}.whole")) == 0, case.name
        _end(run)


def save_and_resume(folder: Path, world_size: int, kind: str, policy: str, steps: int, cases: list[str]) -> None:
    given = (kind, policy, str(folder), steps, cases)
    timeout = HANG_SECONDS if len(cases) <= len(FORMS) else 280.0  # of every row
    run_world(saved_and_whole, world_size, *given, timeout=timeout)
    run_world(resumed, world_size, *given, timeout=timeout)


def first_resumed_steps(
    rank: int, kind: str, policy: str, folder: str, steps: int, cases: list[str], bucket_cap_mb: float
) -> None:
    """Load every case, and run two steps: the second changes what it changes with the same buckets.

    Relative to the largest change of any element, in float64. In the first step buckets are still cut as they were.
    """
    for case in _chosen(cases):
        changes = []
        for cap in (SMALL_BUCKETS, bucket_cap_mb):
            run = begin(kind, policy, case.make(), cap, torch.float64)
            _load(run, Path(folder) / case.name)
            changes.append(run.train(rank, steps, steps + 2))
            _end(run)
        largest = max(float(change.abs().max()) for change in changes[0])
        assert largest_error(*changes) <= bounds.IN_FLOAT64 * largest, case.name


@facts
def the_last_buckets_are_known_after_a_replacement_after_a_load_and_where_there_is_one(
    rank: int, kind: str, folder: Path
) -> None:
    """Make one matrix of a bucket, so that it shows at once if the first step's are cut otherwise."""
    whole = commhooks.make_compressor("powersgd", rank=2, matrices="whole-bucket")
    for what, cap in (
        ("replaced", SMALL_BUCKETS),
        ("loaded and saved again", SMALL_BUCKETS),
        ("one bucket", 25.0),
        ("static graph", SMALL_BUCKETS),
    ):
        path = folder / what
        static: dict[str, Any] = {"static_graph": what == "static graph"}
        run = begin(
            kind, "fifo", commhooks.make_compressor("powersgd", rank=1) if what == "replaced" else whole, cap, **static
        )
        run.train(rank, 0, 3)
        if isinstance(run.hooks, Handle) and what == "replaced":
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
        assert distance(resumed.result(), run.result()) == 0, what
        _end(run)
        _end(resumed)


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


@on_ranks(2)
@pytest.mark.parametrize("kind", BOTH_DDPS)
def test_what_is_owed_of_a_complex_gradient_comes_back(rank: int, kind: str) -> None:
    """Of one that fp16 rounds."""
    runs = [wrap(kind, Turning()) for _ in range(2)]
    hooks = [commhooks.attach(ddp, commhooks.make_compressor("fp16", error_feedback=True)) for ddp in runs]
    for step in range(6):
        if step == 3:
            hooks[1].load_state_dict(hooks[0].state_dict())
        for ddp in runs if step >= 3 else runs[:1]:
            ddp.zero_grad()
            ddp(torch.randn(12, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
    gradients = [[p.grad.clone() for p in ddp.parameters() if p.grad is not None] for ddp in runs]
    assert distance(*gradients) == distance(*(one.state_dict()["local"] for one in hooks)) == 0


@facts
def a_checkpoint_holds_the_state_of_every_powersgd_hook(rank: int, kind: str, folder: Path) -> None:
    """Hooks decide by themselves in what form their state compresses."""
    hooks: dict[str, Any] = {
        "powerSGD_hook": commhooks.powerSGD_hook,
        "batched_powerSGD_hook": commhooks.batched_powerSGD_hook,
        "on fp16": commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook),
    }
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
        _save(whole, folder / name)
        _load(resumed, folder / name)
        for run in runs:
            torch.manual_seed(0)  # dropout
            run.train(rank, 3, 6)
        assert distance(resumed.result(), whole.result()) == 0, name
        wider: Any = PowerSGDState(None, 3, start_powerSGD_iter=1)
        wider.bind(resumed.ddp)
        with pytest.raises(commhooks.CheckpointError, match=r"setting inner\..*rank: saved with 2, now 3"):
            commhooks.load_checkpoint(folder / name, model=resumed.ddp, hooks=wider)


def _chosen(cases: list[str]) -> list[Case]:
    chosen = [case for case in EXCHANGING if not cases or case.name in cases]
    assert len(chosen) == len(cases or EXCHANGING)
    return chosen


def _save(run: Run, path: Path) -> None:
    commhooks.save_checkpoint(
        path, step=_steps_of(run), model=run.ddp, optimizer=run.optimizer, hooks=run.hooks, flush=False
    )


def _load(run: Run, path: Path) -> commhooks.Checkpoint | None:
    return commhooks.load_checkpoint(path, model=run.ddp, optimizer=run.optimizer, hooks=run.hooks)


def _steps_of(run: Run) -> int:
    return run.hooks.steps if isinstance(run.hooks, Handle) else run.hooks.iter


def _end(run: Run) -> None:
    if isinstance(run.hooks, Handle):
        run.hooks.close()


@EACH_FORM_ONCE
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, kind: str, policy: str, names: list[str]
) -> None:
    exchanging = [case.name for case in EXCHANGING if case.name in names]
    save_and_resume(tmp_path, 2, kind, policy, 6 if len(names) <= len(FORMS) else 30, exchanging)


SOME = ["powersgd-2", "powersgd-2-alternating", "fp16-feedback"]  # the last alone has a narrow wire


@pytest.mark.parametrize("kind", thorough(BOTH_DDPS, unless="core".__eq__))
@pytest.mark.parametrize("policy", ["fifo", pytest.param("fused", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "cases", [SOME, pytest.param([], marks=[pytest.mark.soak, pytest.mark.timeout(600)])], ids=["some", "all"]
)
def test_at_four_ranks_too_where_bits_depend_on_how_buckets_are_cut(
    tmp_path: Path, kind: str, policy: str, cases: list[str]
) -> None:
    save_and_resume(tmp_path, 4, kind, policy, 30 if not cases else 4, cases)


WIDE = [case.name for case in CASES if case.exchanges and not case.depends_on_buckets and case.wire is None]
NARROW = [case.name for case in CASES if case.wire is not None]


@pytest.mark.parametrize(
    ("kind", "world_size", "names"),
    [
        pytest.param("core", 3, SOME[:2], id="core, wide"),
        pytest.param("torch", 3, SOME[:2], id="torch, wide", marks=THOROUGH),
        pytest.param("torch", 2, SOME[2:], id="torch, narrow"),
        *(
            pytest.param(kind, world_size, names, id=f"{kind}, all {what}", marks=pytest.mark.soak)
            for kind in ("core", "torch")
            for what, world_size, names in (("wide", 3, WIDE), ("narrow", 2, NARROW))
        ),
    ],
)
def test_with_other_buckets_a_resumed_step_is_the_same_to_the_last_digits(
    tmp_path: Path, kind: str, world_size: int, names: list[str]
) -> None:
    """With 16 bits on the wire at two ranks: from three on, such a sum rounds by the order of its terms."""
    given = (kind, "fifo", str(tmp_path), 3, names)
    run_world(saved_and_whole, world_size, *given, torch.float64)
    run_world(first_resumed_steps, world_size, *given, 0.02)


test = facts.tests()
