"""`TrainWithDiLoCo` in Lightning's own Trainer: what each rank keeps, what is evaluated, and that rounds take place."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from commhooks.integrations.lightning_diloco import DiLoCoStrategy, TrainWithDiLoCo
from tests.frameworks.launch import ROOT, raised, run_ranks, torchrun
from tests.frameworks.lightning_in_worlds import (
    EPOCHS,
    STEPS_AN_EPOCH,
    InThirdEpoch,
    checkpoints_in,
    digest,
    kill_this_rank,
    loader_for,
    raise_a_bug,
    run_script,
    trainer_with,
)
from tests.world import WorldError

pytestmark = pytest.mark.frameworks

STREAMING: dict[str, Any] = {"every": 4, "compressor": "int4", "fragments": 2, "delay": 1, "mixing": 0.5}
"""Checkpoints after 3 and 6 steps are in the middle of rounds, and a fragment is under way at 3."""
SETTINGS: dict[str, dict[str, Any]] = {
    "streaming": {"diloco": STREAMING},
    "plain": {},
    "bf16, accumulated, clipped": {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "diloco": STREAMING,
    },
    "fp16, with an inf on rank 1": {"plugins": lambda: MixedPrecision("16-mixed", "cpu"), "inf_at": 4},
    "compiled": {"compiled": True},
    "manual": {"manual": True, "diloco": STREAMING},
}


class Network(pl.LightningModule):
    """A model with what differs by rank: dropout, statistics of a batch norm, moments of AdamW."""

    def __init__(
        self, manual: bool = False, inf_at: int | None = None, optimizers: int = 1, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 8)
        )
        self.automatic_optimization = not manual
        self.inf_at, self.count = inf_at, optimizers
        self.lr = 0.01

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.global_step == self.inf_at and self.global_rank == 1:
            loss = loss * torch.inf
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
        return loss

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("held out", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        parts = [self.net] if self.count == 1 else [self.net[0:3], self.net[3:]]
        return [torch.optim.AdamW(part.parameters(), lr=self.lr) for part in parts]


def fit(
    callback: TrainWithDiLoCo | None,
    *callbacks: pl.Callback,
    ckpt_path: Path | None = None,
    compiled: bool = False,
    manual: bool = False,
    inf_at: int | None = None,
    optimizers: int = 1,
    dropout: float = 0.1,
    held_out: bool = False,
    strategy: Callable[[], Any] = DiLoCoStrategy,
    **options: Any,
) -> tuple[pl.Trainer, Network]:
    if "plugins" in options:
        options["plugins"] = options["plugins"]()
    given = [callback] if callback is not None else []
    trainer = trainer_with(*given, *callbacks, strategy=strategy, **options)
    torch.manual_seed(trainer.global_rank)  # dropout differs; DiLoCo takes rank 0's model
    model = Network(manual, inf_at, optimizers, dropout)
    trained: Any = torch.compile(model, backend="eager") if compiled else model
    validation = loader_for(trainer, 24) if held_out else None
    trainer.fit(trained, loader_for(trainer, 24), validation, ckpt_path=ckpt_path, weights_only=True)
    return trainer, model


def diloco_of(setting: str) -> TrainWithDiLoCo:
    return TrainWithDiLoCo(**SETTINGS[setting].get("diloco", {"every": 4}))


def fit_as(setting: str, callback: TrainWithDiLoCo, *others: pl.Callback, **more: Any) -> tuple[pl.Trainer, Network]:
    options = {name: value for name, value in SETTINGS[setting].items() if name != "diloco"}
    return fit(callback, *others, **options, **more)


def outcome(trainer: pl.Trainer, model: nn.Module, callback: TrainWithDiLoCo) -> dict[str, str]:
    """Return what must be the same whether a run was interrupted or not."""
    state = callback.state_dict()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "steps": f"{trainer.global_step} {callback.diloco.steps}",
        "model": digest(model.state_dict()),
        "parameters": digest(dict(model.named_parameters())),
        "own": digest(state["own"]),
        "optimizer": digest(trainer.optimizers[0].state_dict()["state"]),
        "diloco": digest(state["diloco"]),
        "generators": digest(state["generators"]),
        "scale": str(scaler and scaler.get_scale()),
    }


def uninterrupted(rank: int) -> dict[str, dict[str, str]]:
    found = {}
    for setting in SETTINGS:
        callback = diloco_of(setting)
        trainer, model = fit_as(setting, callback)
        steps = EPOCHS * STEPS_AN_EPOCH * (2 if SETTINGS[setting].get("manual") else 1)
        counts = callback.diloco.statistics()
        assert trainer.global_step == counts.steps == steps, f"{setting}: each step of the optimizer counts once"
        assert counts.rounds == steps // 4 * SETTINGS[setting].get("diloco", {}).get("fragments", 1), setting
        assert counts.dropped_rounds == 0, setting
        found[setting] = outcome(trainer, model, callback)
    return found


def interrupted(rank: int, folder: str) -> None:
    """Stop every run in its third epoch: all by an exception, and the last one by a kill."""
    *others, last = SETTINGS
    for setting in others:
        act = functools.partial(fit_as, setting, diloco_of(setting), checkpoints_in(Path(folder, setting)))
        assert raised(functools.partial(act, InThirdEpoch(raise_a_bug))) == "BugError: ", setting
    fit_as(last, diloco_of(last), checkpoints_in(Path(folder, last)), InThirdEpoch(kill_this_rank))


def resumed(rank: int, folder: str) -> dict[str, dict[str, str]]:
    found = {}
    for number, setting in enumerate(SETTINGS):
        callback = diloco_of(setting)
        checkpoint = Path(folder, setting, f"epoch={number % 2}.ckpt")  # by turns from the first epoch's end
        trainer, model = fit_as(setting, callback, ckpt_path=checkpoint)
        found[setting] = outcome(trainer, model, callback)
    return found


# --- data, evaluation, what is sent -----------------------------------------------------------------------------------


class Seen(pl.Callback):
    """Records the numbers of the samples of each epoch, and the parameters in training and in evaluation."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []
        self.trained: list[str] = []
        self.held_out: list[str] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.samples.append([])

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, number: int) -> None:
        self.samples[-1] += batch[2].tolist()
        self.trained.append(digest(dict(module.named_parameters())))

    def on_validation_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *others: Any) -> None:
        if others[-1] == others[1] == 0:
            self.held_out.append(digest(dict(module.named_parameters())))


def seen(rank: int) -> dict[str, Any]:
    """Return which samples a rank sees, and with which parameters it trains and evaluates."""
    found: dict[str, Any] = {}
    for name, held_out in (("evaluated", True), ("not evaluated", False)):
        record, callback = Seen(), TrainWithDiLoCo(**STREAMING)
        trainer, model = fit(callback, record, held_out=held_out, val_check_interval=1, dropout=0.0)
        found[name] = {
            "samples": record.samples,
            "trained": record.trained,
            "held out": list(record.held_out),
            "after": digest(dict(model.named_parameters())),
            "diloco": digest(callback.diloco.state_dict()),
        }
        before = digest(dict(model.named_parameters()))
        (told,) = trainer.validate(model, loader_for(trainer, 24), verbose=False)
        assert trainer.test(model, loader_for(trainer, 24), verbose=False) == [told]
        assert digest(dict(model.named_parameters())) == before
        found[name]["loss"] = told["held out"]
    return found


# --- around a fit -----------------------------------------------------------------------------------------------------


def around_a_fit(rank: int, folder: str) -> None:
    """Save after a fit and after an exception, keep the best, fit twice, search for a learning rate."""
    callback = TrainWithDiLoCo(**STREAMING)
    best = ModelCheckpoint(Path(folder, "best"), monitor="held out", save_top_k=1, save_last="link")
    trainer, model = fit(callback, best, held_out=True)
    dist.barrier()
    files = {path.name for path in Path(folder, "best").iterdir()}
    assert len(files) == 3 and "last.ckpt" in files, f"those of earlier epochs are removed on every rank: {files}"
    whole = outcome(trainer, model, callback)
    trainer.save_checkpoint(Path(folder, "after.ckpt"))
    assert {path.name for path in Path(folder).glob("after*")} == {"after.ckpt", "after.ckpt-rank1.pt"}
    shared = torch.load(Path(folder, "after.ckpt"), weights_only=True)
    assert digest(shared["state_dict"]) == digest(model.state_dict()) or rank, "a checkpoint holds what all share"
    trainer.save_checkpoint(Path(folder, "weights.ckpt"), weights_only=True)
    assert [path.name for path in Path(folder).glob("weights*")] == ["weights.ckpt"]

    again = TrainWithDiLoCo(**STREAMING)
    trainer, model = fit(again, ckpt_path=Path(folder, "after.ckpt"))
    ended = outcome(trainer, model, again) | {"generators": whole["generators"]}  # this one has drawn for its loader
    assert ended == whole, [name for name in whole if ended[name] != whole[name]]
    trainer, model = fit(again, ckpt_path=Path(folder, "best", "last.ckpt"), max_epochs=EPOCHS + 1)
    assert again.diloco.steps == trainer.global_step == 15, "a link leads every rank to its own file"
    trainer.fit_loop.max_epochs = 2 * EPOCHS + 1
    trainer.fit(model, loader_for(trainer, 24))  # with a new optimizer, and new rounds
    assert (trainer.global_step, again.diloco.steps) == (27, 12)

    finder = LearningRateFinder(num_training_steps=5)
    trainer, _ = fit(again, finder, default_root_dir=folder, logger=True)
    assert trainer.global_step == again.diloco.steps == 12, "it trains for 5 steps and goes back to where it began"
    assert not list(Path(folder).glob(".lr_find*")), "all ranks' files"

    on_exception = OnExceptionCheckpoint(folder, "exception")
    caught = raised(lambda: fit(TrainWithDiLoCo(every=4), InThirdEpoch(raise_a_bug), on_exception))
    assert caught == "BugError: ", caught
    refused = raised(lambda: fit(TrainWithDiLoCo(every=4), ckpt_path=Path(folder, "exception.ckpt")))
    assert "the checkpoint has no state of DiLoCo (it was saved after an exception)" in refused, refused


# --- what cannot work -------------------------------------------------------------------------------------------------


def refusals(rank: int, folder: str) -> dict[str, str]:
    """Return the error of everything that cannot work."""
    trainer, _ = fit(TrainWithDiLoCo(every=4))
    for name in ("saved", "mixed", "lacks a file"):
        trainer.save_checkpoint(Path(folder, f"{name}.ckpt"))
    if rank == 1:
        Path(folder, "lacks a file.ckpt-rank1.pt").unlink()
        shutil.copy(Path(folder, "saved.ckpt-rank1.pt"), Path(folder, "mixed.ckpt-rank1.pt"))
    dist.barrier()

    def resume(name: str | None, **options: Any) -> str:
        more: dict[str, Any] = {"every": 4, **options}
        path = Path(folder, f"{name}.ckpt") if name else None
        return raised(lambda: fit(TrainWithDiLoCo(**more), ckpt_path=path, max_epochs=5))

    told = {
        "another strategy": raised(lambda: fit(TrainWithDiLoCo(every=4), strategy=DDPStrategy)),
        "no callback": raised(lambda: fit(None)),
        "of the DDP": raised(lambda: DiLoCoStrategy(find_unused_parameters=True)),
        "batch norms": raised(lambda: fit(TrainWithDiLoCo(every=4), sync_batchnorm=True)),
        "two optimizers": raised(lambda: fit(TrainWithDiLoCo(every=4), manual=True, optimizers=2)),
        "no round": raised(lambda: fit(TrainWithDiLoCo(every=100))),
        "no argument": raised(lambda: TrainWithDiLoCo(every=4, rank=2)),  # type: ignore[call-arg]
        "spread": raised(lambda: TrainWithDiLoCo(every=4, world_size="spread")),
        "before fit": raised(lambda: TrainWithDiLoCo(every=4).diloco),
        "other settings": resume("saved", every=6),
        "different saves": resume("mixed"),
        "one resumes": resume("saved" if rank == 0 else None),
        "lacks a file": resume("lacks a file"),
    }
    fit(TrainWithDiLoCo(every=100), fast_dev_run=True)  # one batch
    Path(folder, "ddp").mkdir(exist_ok=True)
    trainer, _ = fit(None, strategy=DDPStrategy)
    trainer.save_checkpoint(Path(folder, "ddp.ckpt"))
    told["saved without"] = resume("ddp")
    begun = TrainWithDiLoCo(every=4, missing="reset")
    trainer, _ = fit(begun, ckpt_path=Path(folder, "ddp.ckpt"), max_epochs=6)
    assert (trainer.global_step, begun.diloco.steps) == (18, 6), "begun with data-parallel training"
    return told


def on_other_ranks(rank: int, folder: str, epoch: int) -> dict[str, Any]:
    """Resume what another number of ranks has saved, one epoch further, and save again."""
    saved = Path(folder, "kept.ckpt")
    options: dict[str, Any] = {"every": 2, "compressor": "top-k"}
    told = ""
    if saved.exists():
        told = raised(lambda: fit(TrainWithDiLoCo(**options), ckpt_path=saved, max_epochs=epoch))
    callback, begun = TrainWithDiLoCo(**options, world_size="keep"), Begun()
    trainer, _ = fit(callback, begun, ckpt_path=saved if told else None, max_epochs=epoch)
    trainer.save_checkpoint(saved)
    state = callback.state_dict()
    return {"told": told, "begun": begun.state, "ended": described(state["diloco"], rank)}


class Begun(pl.Callback):
    """Keeps the state with which training begins."""

    state: dict[str, Any]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        callback = next(one for one in trainer.callbacks if isinstance(one, TrainWithDiLoCo))
        self.state = described(callback.diloco.state_dict(), trainer.global_rank)
        named = dict(module.named_parameters())
        self.state["parameters"] = digest([named[name] for name in sorted(named)])


def described(state: dict[str, Any], rank: int) -> dict[str, Any]:
    local = [group["local"][f"rank{rank}"] for group in state["groups"].values()]
    residuals = [entries["residual"] for of_group in local for entries in of_group.values() if "residual" in entries]
    outer = state["shared"]["outer"]
    return {
        "outer": digest([outer[name] for name in sorted(outer)]),
        "momentum": digest(state["shared"]["outer_optimizer"]["state"]),
        "residual": digest(residuals),
        "is zero": not any(bool(residual.any()) for residual in residuals),
    }


# --- tests ------------------------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "docs" / "examples" / "lightning_diloco.py"
ERRORS = {
    "another strategy": r"AttachError: TrainWithDiLoCo: DDPStrategy averages .* pass Trainer\(strategy=DiLoCoStrategy",
    "no callback": r"AttachError: DiLoCoStrategy: each rank would train alone; add TrainWithDiLoCo",
    "of the DDP": r"SettingsError: DiLoCoStrategy\(find_unused_parameters=...\)",
    "batch norms": "SettingsError: DiLoCoStrategy: sync_batchnorm=True would communicate in every forward pass",
    "two optimizers": r"SettingsError: TrainWithDiLoCo: DiLoCo takes one optimizer .*\(configure_optimizers returned 2",
    "no round": "NotAveragedError: TrainWithDiLoCo: training ended after 12 steps of the optimizer, .*100 steps",
    "no argument": "SettingsError: TrainWithDiLoCo: unknown argument rank",
    "spread": r"SettingsError: TrainWithDiLoCo\(world_size='spread'\)",
    "before fit": "AttachError: TrainWithDiLoCo: there is no DiLoCo before trainer.fit",
    "other settings": "CheckpointError: rank 0: .*every: saved with 4, now 6; pass settings='change'",
    "different saves": "CheckpointError: TrainWithDiLoCo: ranks begin with checkpoints of different saves.*cut short",
    "one resumes": "CheckpointError: TrainWithDiLoCo: .* of different saves .rank 0: .*; rank 1: no checkpoint",
    "lacks a file": "CheckpointError: .*rank 1: .* there is none of its own beside it .*-rank1.pt",
    "saved without": r"CheckpointError: .* no state of DiLoCo \(it was saved without TrainWithDiLoCo\)",
    "alone": "AttachError: TrainWithDiLoCo: this run has one process",
}


@pytest.fixture(scope="module")
def whole() -> list[dict[str, dict[str, str]]]:
    """Return for each rank how 12 steps end without interruption."""
    return run_ranks(uninterrupted, 2)


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    """Return for each rank how 12 steps end after a stop and a resume."""
    folder = str(tmp_path_factory.mktemp("diloco"))
    with pytest.raises(WorldError) as killed:
        run_ranks(interrupted, 2, folder)
    assert -9 in {outcome.exit_code for outcome in killed.value.outcomes}, str(killed.value)
    return run_ranks(resumed, 2, folder)


@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_end_with_one_model_and_keep_their_own(whole: list[dict[str, dict[str, str]]], setting: str) -> None:
    first, second = (of_rank[setting] for of_rank in whole)
    assert first["parameters"] == second["parameters"]
    for part in ("optimizer", "generators"):
        assert first[part] != second[part]
    ends_with_a_round = "diloco" not in SETTINGS[setting]
    assert (first["own"] == second["own"]) == ends_with_a_round
    assert (first["scale"] != second["scale"]) == setting.startswith("fp16"), "one rank's scaler left out a step"


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(
    whole: list[dict[str, dict[str, str]]], again: list[dict[str, dict[str, str]]], setting: str
) -> None:
    for uninterrupted, resumed in zip(whole, again, strict=True):
        assert resumed[setting] == uninterrupted[setting]


def test_ranks_see_other_samples_and_evaluate_one_model_without_changing_training() -> None:
    ranks = run_ranks(seen, 2)
    for first, second in zip(*(of_rank["evaluated"]["samples"] for of_rank in ranks), strict=True):
        assert sorted(first + second) == list(range(STEPS_AN_EPOCH * 24)), "each sample once an epoch, on one rank"
    for of_rank in ranks:
        evaluated, without = of_rank["evaluated"], of_rank["not evaluated"]
        for part in ("samples", "trained", "after", "diloco"):
            assert evaluated[part] == without[part], part
        assert len(evaluated["held out"]) == EPOCHS * STEPS_AN_EPOCH + 1, "after each step, and once before"
        assert not set(evaluated["held out"][1:]) & set(evaluated["trained"][1:]), "training is mixed with the copies"
    held_out = [of_rank["evaluated"]["held out"] for of_rank in ranks]
    assert held_out[0] == held_out[1]
    assert len(set(held_out[0])) > 4, "the outer copies move"
    assert ranks[0]["evaluated"]["trained"][1:] != ranks[1]["evaluated"]["trained"][1:]
    assert {of_rank["evaluated"]["after"] for of_rank in ranks} == {held_out[0][-1]}
    assert ranks[0]["evaluated"]["loss"] == ranks[1]["evaluated"]["loss"]


def test_it_saves_after_a_fit_removes_every_ranks_files_and_fits_again(tmp_path: Path) -> None:
    run_ranks(around_a_fit, 2, str(tmp_path))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return rank 0's error for everything that cannot work."""
    folder = str(tmp_path_factory.mktemp("refusals"))
    first, second = run_ranks(refusals, 2, folder)
    assert [name for name in first if first[name].split(":")[0] != second[name].split(":")[0]] == []
    alone = raised(lambda: fit(TrainWithDiLoCo(every=4)))
    return {**first, "alone": alone}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_work_says_what_to_do(errors: dict[str, str], case: str) -> None:
    assert re.match(ERRORS[case], errors[case]), errors[case]


def test_other_numbers_of_ranks_keep_their_own_residuals(tmp_path: Path) -> None:
    """4, then 3, then 4 ranks: all begin at the outer copies, and whoever joins has an empty residual."""
    runs: list[list[dict[str, Any]]] = [
        run_ranks(on_other_ranks, ranks, str(tmp_path), n) for n, ranks in enumerate((4, 3, 4), 1)
    ]
    for before, after in pairwise(runs):
        for rank, of_rank in enumerate(after):
            assert "saved by" in of_rank["told"] and "'keep' to let each rank keep its own" in of_rank["told"]
            begun, ended = of_rank["begun"], before[0]["ended"]
            assert begun["parameters"] == begun["outer"] == ended["outer"]
            assert begun["momentum"] == ended["momentum"]
            if rank < len(before):
                assert begun["residual"] == before[rank]["ended"]["residual"]
            assert begun["is zero"] == (rank >= len(before))
            assert not of_rank["ended"]["is zero"]


def test_the_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    run_ranks(run_script, 2, str(EXAMPLE), "2", str(tmp_path))
    printed = torchrun(EXAMPLE, "4", cwd=tmp_path, timeout=70)
    found = re.findall(r"step 64: held-out loss ([0-9.]+), ([0-9,]+) bytes a step", printed)[0]
    assert float(found[0]) < 1.9 and float(found[1].replace(",", "")) < 3_000, "fp32 gradients are 153,640 bytes"
    end = torch.load(tmp_path / "checkpoints" / "lightning_diloco" / "last.ckpt-rank1.pt", weights_only=True)
    assert end["callbacks"]["commhooks.TrainWithDiLoCo"]["own"], "each rank keeps its own"
