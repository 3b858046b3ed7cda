"""DiLoCo over process groups: as in one process, resumed at any step, and failing by name."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
import ddp_core
from commhooks import CheckpointError, DiLoCo, ModelAverager
from commhooks.compressors import AllReduceMean
from tests.commhooks.ranks import of_every_rank
from tests.commhooks.resuming import distance, roundtrip
from tests.commhooks.told import Told, told_by
from tests.ddp_core.facts import Facts
from tests.diloco.workers import Worker, adamw, network, train_in_lockstep, workers
from tests.quantised import OnCodes
from tests.tiers import in_turn
from tests.world import on_ranks, run_world, run_world_outcomes, stay_away, tell

COMPRESSORS = (("all-reduce", "codebook", "sign", "sparse-loco"), ("bf16", "int4", "top-k", "powersgd"))
SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {"every": 6},
    "fragments": {"every": 6, "fragments": 3, "delay": 4, "mixing": 0.5},
}
facts = Facts()
STOP, END = 14, 27
"""In the middle of a round; with a delay, while two fragments are under way."""


def result_of(worker: Worker) -> dict[str, Any]:
    """Return what must be the same after a resume and in one process, with this rank's own state."""
    saved = worker.save()
    groups = saved["diloco"]["groups"]
    kept = ("step", "replicated", "local", "shapes")
    saved["diloco"] = {
        "shared": saved["diloco"]["shared"],
        "groups": {label: {name: group[name] for name in kept} for label, group in groups.items()},
    }
    return saved


def trained_and_resumed(rank: int, schedule: str, compressors: Sequence[str]) -> list[dict[str, Any]]:
    """Train under each of the compressors; stop in the middle of a round, and go on with new objects."""
    found = []
    for compressor in compressors:
        settings = {"compressor": compressor, **SCHEDULES[schedule]}
        worker = Worker(rank, **settings)
        worker.train(0, STOP)
        under_way = [fragment.due for fragment in worker.diloco._fragments if fragment.due is not None]
        assert len(under_way) == (2 if schedule == "fragments" else 0), under_way
        saved = roundtrip(worker.save())
        worker.diloco.close()
        resumed = Worker(rank, **settings)
        resumed.load(saved)
        resumed.train(STOP, END)
        found.append(result_of(resumed))
        assert resumed.diloco.statistics().steps == END
        resumed.diloco.close()
    return found


@pytest.mark.parametrize(("schedule", "compressors"), in_turn(list(SCHEDULES), COMPRESSORS), ids=str)
def test_ranks_compute_what_workers_of_one_process_do_and_resume_at_any_step(
    schedule: str, compressors: Sequence[str]
) -> None:
    """Bit for bit: at two ranks a sum's bits do not depend on its order."""
    of_ranks = run_world(trained_and_resumed, 2, schedule, compressors)
    for number, compressor in enumerate(compressors):
        team = workers(2, compressor=compressor, **SCHEDULES[schedule])
        train_in_lockstep(team, 0, END)
        for worker, found in zip(team, of_ranks, strict=True):
            assert distance(found[number], result_of(worker)) == 0, compressor


@facts
def ranks_take_rank_0s_model_whatever_its_dtypes(rank: int) -> None:
    """Gloo sends neither int16, nor unsigned integers, nor fp8."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.copy_(torch.full((4, 4), float(rank)))
    model.weight.data = model.weight.data.t()
    for dtype in (torch.int16, torch.uint16, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.complex64):
        model.register_buffer(str(dtype).removeprefix("torch."), torch.full((2, 3), 1 - rank).to(dtype))
    model.register_buffer("conjugate", torch.full((2, 3), complex(1 - rank, rank)).conj())
    model.register_buffer("negative", torch.full((2, 3), complex(rank, rank - 1)).conj().imag)
    diloco = commhooks.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    for _ in range(2):
        assert not model.weight.any()
        for buffer in model.buffers():
            assert torch.equal(buffer.to(torch.complex64), torch.ones(2, 3, dtype=torch.complex64)), buffer.dtype
        diloco.step()
    diloco.close()


@facts
def frozen_codes_are_left_as_each_rank_has_them(rank: int) -> None:
    """So is all that has no bytes to send or overwrite; a frozen base of plain integers is rank 0's."""
    for kind in (DiLoCo, ModelAverager):
        model = OnCodes(rank, width=20)
        model.register_buffer("adjacency", torch.eye(3).mul(rank).to_sparse())
        model.register_buffer("constant", torch.full((1,), float(rank)).expand(3, 3))
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        overlapping: dict[str, Any] = {"fragments": 2, "delay": 1, "mixing": 0.5} if kind is DiLoCo else {}
        made: Any = kind(model, optimizer, every=2, **overlapping)
        assert model.marks() == [rank, 0]
        for number in range(5):
            Worker.gradients(model, rank, number)
            optimizer.step()
            if kind is DiLoCo:
                made.step()
            else:
                made.average_parameters(model.head.parameters())
        if kind is DiLoCo:
            with made.outer_parameters():
                heads = of_every_rank(model.head.bias.detach().clone())
            assert torch.equal(heads[0], heads[1])
            assert made.model_state()["base.weight"].codes[0, 0] == rank
        assert model.marks() == [rank, 0]
        assert model.get_buffer("adjacency").to_dense()[0, 0] == rank == model.get_buffer("constant")[2, 2]
        made.close()


@on_ranks(2)
def test_checkpoints_hold_every_ranks_model_optimizer_and_scaler(rank: int, tmp_path: Path) -> None:
    """Also in the middle of a round with exchanges under way. What all ranks share is the model of outer copies."""
    settings = {"compressor": "top-k", **SCHEDULES["fragments"]}
    worker = Worker(rank, **settings)
    worker.train(0, STOP)
    parts = {"model": worker.model, "optimizer": worker.optimizer, "hooks": worker.diloco}
    parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0 / (1 + rank))  # rank 1 left out a step
    path = commhooks.save_checkpoint(tmp_path / "run", step=STOP, **parts)  # type: ignore[arg-type]  # of several types
    shared = {name: t.clone() for name, t in worker.diloco.model_state().items()}
    worker.train(STOP, END)
    expected = result_of(worker)
    worker.diloco.close()

    resumed = Worker(rank, **settings)
    scaler = torch.amp.GradScaler("cpu")
    parts = {"model": resumed.model, "optimizer": resumed.optimizer, "hooks": resumed.diloco, "scaler": scaler}
    loaded = commhooks.load_checkpoint(tmp_path / "run", **parts)  # type: ignore[arg-type]
    assert loaded is not None and loaded.step == STOP == resumed.diloco.steps
    assert scaler.get_scale() == 1024.0 / (1 + rank)
    resumed.train(STOP, END)
    assert distance(result_of(resumed), expected) == 0

    ddp = ddp_core.DistributedDataParallel(network())  # data-parallel training begins from the outer copies
    commhooks.load_checkpoint(path, model=ddp)
    assert distance(dict(ddp.module.state_dict()), shared) == 0
    attachment = commhooks.attach(ddp, "top-k")
    told = told_by(lambda: commhooks.load_checkpoint(path, model=ddp, hooks=attachment))
    assert "it was saved with the channels fragment 0 of " in told.text
    commhooks.save_checkpoint(tmp_path / "ddp", step=1, model=ddp, optimizer=adamw(ddp), hooks=attachment)
    started = Worker(rank, every=4)
    commhooks.load_checkpoint(tmp_path / "ddp", model=started.model, optimizer=started.optimizer)
    assert distance(dict(started.model.state_dict()), shared) == 0, (
        "and low-communication training from an ordinary one"
    )
    told = told_by(lambda: commhooks.load_checkpoint(tmp_path / "ddp", model=started.model, hooks=started.diloco))
    assert "it was saved with the state of an attachment, not of DiLoCo" in told.text
    for diloco in (started.diloco, resumed.diloco):
        diloco.close()
    attachment.close()


@facts
def a_state_that_does_not_match_is_refused_on_every_rank_and_changes_nothing(rank: int) -> None:
    worker = Worker(rank, every=6, compressor="int4")
    worker.train(0, 7)
    saved, before = worker.save()["diloco"], worker.save()
    other = Worker(rank, every=8, delay=2, compressor="int4")
    told = told_by(lambda: other.diloco.load_state_dict(saved))
    assert "every: saved with 6, now 8; pass settings='change'; delay: saved with 0, now 2" in told.text
    other.diloco.close()
    del saved["shared"]["outer"]
    told = told_by(lambda: worker.diloco.load_state_dict(saved if rank else before["diloco"]))
    assert told.error == "CheckpointError" and (rank == 0 or "state is damaged: outer: expected" in told.text), told
    told = told_by(lambda: worker.diloco.load_state_dict(CheckpointError("the file is gone")))
    assert "the file is gone" in told.text and distance(worker.save(), before) == 0
    worker.train(7, 13)
    worker.diloco.close()


# --- ranks that differ, fail or die -----------------------------------------------------------------------------------


def tracking(statistics: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=statistics))


@facts
def ranks_with_other_settings_are_told_on_every_rank_when_built(rank: int) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"every": 3 + rank}, "DiLoCo: ranks disagree: every: 3 (rank 0), 4 (rank 1)"),
        ({"every": 3, "compressor": ("int4", "int8")[rank]}, "ranks disagree: compressor"),
        ({"every": 3 * rank}, "DiLoCo(every=0): every must be an int of at least 1"),
        ({"every": 3, "outer": functools.partial(torch.optim.SGD, lr=rank + 1.0)}, "ranks disagree: outer optimizer"),
        ({"every": 3, "model": nn.Linear(2 + rank, 2)}, "ranks disagree: parameter weight"),
        ({"every": 3, "model": tracking(rank == 0)}, "ranks disagree: buffer 1.running_mean: shape (4,)"),
        ({"every": 3, "fragments": 1 if rank else object()}, "fragments must be an int or shell patterns"),
    ]
    for settings, complaint in cases:
        told = told_by(lambda: Worker(rank, **settings))  # noqa: B023 called now
        assert told.error == "SettingsError" and complaint in told.text, told
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    worker = Worker(rank, every=3, model=model)
    assert not model.weight.any(), "all take rank 0's"
    worker.diloco.close()


test_on_two_ranks = facts.tests()


@on_ranks(2, check_exit=False)
@pytest.mark.parametrize("what", ["frozen", "two steps"])
def test_what_one_rank_does_wrong_is_told_to_all(rank: int, what: str) -> None:
    worker = Worker(rank, every=3, hook_timeout=20.0)
    worker.train(0, 4)
    if rank and what == "frozen":
        next(worker.model.parameters()).requires_grad_(False)
    elif rank:
        worker.inner_step(4)
    told = told_by(lambda: worker.train(4, 10))
    complaint = (
        "'0.weight' no longer requires a gradient" if what == "frozen" else "AdamW is about to take a second step"
    )
    assert f"rank 1: {complaint}" in told.text and told.seconds < 20.0, told


class Clumsy(AllReduceMean):
    """Averages, until this rank's turn to fail."""

    fails = False

    def compress(self, bucket: Any, context: Any) -> Any:
        if type(self).fails:
            raise RuntimeError("of its own")
        yield from super().compress(bucket, context)


@on_ranks(2, check_exit=False)
def test_a_round_that_failed_is_not_forgotten_by_whoever_catches_the_error(rank: int) -> None:
    """Each rank would go on by itself: its round is neither free nor due again."""
    for what, complaint in (
        ("compressor", "rank 1, round 1, fragment 0 of 1.*RuntimeError: of its own"),
        ("outer optimizer", "RuntimeError: of its own|^of its own$"),
        ("late", "hook_timeout=1.0"),
    ):
        worker = Worker(rank, every=4, compressor=Clumsy(), hook_timeout=1.0 if what == "late" else 20.0)
        worker.train(0, 7)
        if rank and what == "outer optimizer":
            worker.diloco.outer_optimizer.register_step_pre_hook(_fail)
        Clumsy.fails = rank == 1 and what == "compressor"
        if rank and what == "late":
            stay_away()
            time.sleep(0.5)  # it drops its connections meanwhile
        told = []
        for step in range(7, 17):
            told.append(told_by(functools.partial(worker.train, step, step + 1)))
            if rank == 0 and "hook_timeout=1.0" in told[-1].text:
                tell(rank)
        Clumsy.fails = False
        failed = next(number for number, one in enumerate(told) if one.error != "nothing")
        # Who came late has the other's part of the sum already, and learns of its end in the next round.
        assert failed == (4 if (rank, what) in {(0, "outer optimizer"), (1, "late")} else 0), told
        for one in told[failed:]:
            assert re.search(complaint, one.text), (what, one)
        assert "DiLoCo.step: not taken, because each rank has trained alone" in told[-1].text
        if what != "late":  # to close waits 3 s for what nobody answers
            worker.diloco.close()


def _fail(*_: object) -> None:
    raise RuntimeError("of its own")


def dies(rank: int) -> Told:
    worker = Worker(rank, every=4, fragments=2, delay=1, hook_timeout=20.0)
    worker.train(0, 9)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return told_by(lambda: worker.train(9, 20))


def test_a_rank_that_dies_is_named_with_the_round_and_the_fragment() -> None:
    alive, dead = run_world_outcomes(dies, 2, check_exit=False)
    assert dead.exit_code == -signal.SIGKILL
    assert alive.value.error in ("CollectiveError", "RuntimeError"), alive.value
    assert "rank 0, round 2, fragment 0 of 2" in alive.value.text and "No answer from rank 1" in alive.value.text


# --- sites ------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_sites_train_data_parallel_inside_and_average_seldom_between(rank: int) -> None:
    """Equal to two workers, each of which trains on what its site's ranks have together; sums of two are exact."""
    sites = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    between = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    site = rank // 2
    model = ddp_core.DistributedDataParallel(network(), process_group=sites[site])
    optimizer = adamw(model)
    told = told_by(lambda: DiLoCo(model, optimizer, every=3))
    assert "DistributedDataParallel averages the gradients of ranks" in told.text, told
    diloco = DiLoCo(model, optimizer, every=3, compressor="int4", process_group=between[rank % 2])
    for step in range(8):
        Worker.gradients(model, rank, step)
        optimizer.step()
        diloco.step()
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, dict(model.module.state_dict()))
    assert distance(states[2 * site], states[2 * site + 1]) == 0, "ranks of one site stay equal"
    assert distance(states[0], states[2]) > 0, "sites do not"
    diloco.step()
    dist.all_gather_object(states, dict(model.module.state_dict()))
    assert max(distance(states[0], state) for state in states) == 0
    diloco.close()


# --- other numbers of ranks -------------------------------------------------------------------------------------------


def goes_on(rank: int, folder: str, first: int, last: int, rule: str) -> dict[str, Any]:
    """Load what other processes have saved, train, and save; return what was loaded and saved."""
    worker = Worker(rank, every=6, compressor="top-k", fragments=2, delay=2)
    parts: dict[str, Any] = {"model": worker.model, "optimizer": worker.optimizer, "hooks": worker.diloco}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = commhooks.load_checkpoint(folder, **parts, world_size=rule)
    assert (0 if loaded is None else loaded.step) == first == worker.diloco.steps
    saved = worker.save()
    begun: dict[str, Any] = {"model": saved["model"], "optimizer": saved["optimizer"]["state"], **saved["diloco"]}
    begun["told"] = [str(one.message) for one in caught if "commhooks:" in str(one.message)]
    worker.train(first, last)
    commhooks.save_checkpoint(folder, step=last, **parts)
    saved = worker.save()
    ended = {"model": worker.diloco.model_state(), "optimizer": saved["optimizer"]["state"], **saved["diloco"]}
    worker.diloco.close()
    return roundtrip({"begun": begun, "ended": ended})


def residuals_of(state: dict[str, Any], rank: int) -> dict[str, Any]:
    local = [group["local"][f"rank{rank}"] for group in state["groups"].values()]
    return {name: entries["residual"] for of_group in local for name, entries in of_group.items()}


def test_new_processes_of_other_numbers_keep_their_own_residuals(tmp_path: Path) -> None:
    """3, then 2, then 3 ranks: outer copies, momenta and means that are due go on, and new ranks begin with them."""
    three = run_world(goes_on, 3, str(tmp_path), 0, 8, "refuse")  # the last fragment is under way, and another one due
    two = run_world(goes_on, 2, str(tmp_path), 8, 17, "keep")
    again = run_world(goes_on, 3, str(tmp_path), 17, 24, "keep")
    for before, after in ((three, two), (two, again)):
        ended, due = before[0]["ended"], before[0]["ended"]["shared"]["due"]
        assert due, "an exchange was under way"
        for rank, of_rank in enumerate(after):
            begun = of_rank["begun"]
            assert distance(begun["model"], ended["model"]) == 0, "all begin at the outer copies"
            assert distance(begun["shared"], ended["shared"]) == 0
            stayed = rank < len(before)
            if stayed:
                assert distance(residuals_of(begun, rank), residuals_of(before[rank]["ended"], rank)) == 0
            else:
                assert not any(bool(residual.any()) for residual in residuals_of(begun, rank).values())
            assert distance(begun["optimizer"], before[rank if stayed else 0]["ended"]["optimizer"]) == 0
        outer = [of_rank["ended"]["shared"] for of_rank in after]
        assert max(distance(outer[0], other) for other in outer) == 0
    lost = [r.double().square().sum() for r in residuals_of(three[2]["ended"], 2).values()]
    told = " ".join(two[0]["begun"]["told"])
    assert told.count("what ranks that have left had not sent of fragment") == 2, told
    norms = [float(norm) for norm in re.findall(r"that of rank 2 \(norm ([^)]*)\)", told)]
    assert sum(norm**2 for norm in norms) == pytest.approx(float(sum(lost)), rel=1e-3), "given with four digits"
    assert not two[1]["begun"]["told"] and not again[0]["begun"]["told"]
