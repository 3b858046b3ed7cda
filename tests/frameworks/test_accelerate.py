"""`commhooks.integrations.accelerate` under the real library: two ranks, Gloo, processors."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks import DiLoCo
from tests.frameworks.huggingface import die, differences, settle_in, train_and_resume, what_it_became
from tests.frameworks.launch import ROOT, raised, refused
from tests.world import run_world, run_world_outcomes

pytestmark = pytest.mark.frameworks

STEPS, SAVED_AT, BATCH = 12, 6, 4
PLAIN: dict[str, Any] = {"compressor": "powersgd"}
AS_PEOPLE_TRAIN = {"compressor": "top-k", "accumulate": 2, "clip": 0.5, "precision": "bf16"}
OF_DDP_CORE = {"compressor": "powersgd", "ddp_core": True, "accumulate": 2, "clip": 0.5, "precision": "bf16"}


class Run:
    """A script that trains with Accelerate."""

    def __init__(
        self,
        *,
        compressor: str | None,
        ddp_core: bool = False,
        accumulate: int = 1,
        clip: float = 0.0,
        precision: str = "no",
        dynamo: str | None = None,
        kwargs: list[Any] | None = None,
        **options: Any,
    ) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            mixed_precision=precision,
            dynamo_backend=dynamo,
            kwargs_handlers=kwargs,
        )
        self.accumulate, self.clip = accumulate, clip
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        samples = torch.randn(2 * BATCH * accumulate * STEPS, 64)
        labels = torch.randint(8, (len(samples),))
        loader: Any = DataLoader(TensorDataset(samples, labels), batch_size=BATCH)
        model: nn.Module
        if ddp_core:
            from ddp_core import DistributedDataParallel

            model = DistributedDataParallel(self.accelerator.prepare_model(self.module, evaluation_mode=True))
        else:
            model = self.accelerator.prepare(self.module)
        self.model = model
        self.optimizer, self.loader = self.accelerator.prepare(optimizer, loader)
        self.attachment: commhooks.Handle[Any] | None = None
        if compressor is not None:
            from commhooks.integrations.accelerate import compress

            self.attachment = compress(self.accelerator, self.model, compressor, **options)

    def train(self, begin: int, end: int) -> None:
        """Make the steps from `begin` to `end`."""
        loader = self.accelerator.skip_first_batches(self.loader, begin * self.accumulate)
        for number, (samples, labels) in enumerate(loader, begin * self.accumulate):
            if number == end * self.accumulate:
                break
            self.step(self.model, samples, labels)

    def step(self, model: nn.Module, samples: Tensor, labels: Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(nn.functional.cross_entropy(model(samples), labels))
            if self.clip and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def became(self) -> dict[str, Any]:
        assert self.attachment is not None
        return what_it_became(self.module, self.attachment)


def uninterrupted(rank: int, settings: dict[str, Any]) -> tuple[dict[str, Any], float, int]:
    settle_in(rank)
    run = Run(**settings)
    run.train(0, STEPS)
    assert run.attachment is not None
    counted = run.attachment.statistics()
    return run.became(), counted.ratio, run.attachment.steps


def killed_after_saving(rank: int, folder: str, settings: dict[str, Any]) -> None:
    settle_in(rank)
    run = Run(**settings)
    run.train(0, SAVED_AT)
    run.accelerator.save_state(folder)
    run.train(SAVED_AT, SAVED_AT + 1)
    die()


def resumed(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    settle_in(rank)
    run = Run(**settings)
    run.accelerator.load_state(folder)
    run.train(SAVED_AT, STEPS)
    return run.became()


@pytest.mark.parametrize(
    "settings", [PLAIN, AS_PEOPLE_TRAIN, OF_DDP_CORE], ids=["plain", "as-people-train", "ddp_core"]
)
def test_a_killed_run_goes_on_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = run_world(uninterrupted, 2, settings)
    died = run_world_outcomes(killed_after_saving, 2, str(tmp_path / "saved"), settings)
    assert [outcome.exit_code for outcome in died] == [-9, -9], [outcome.describe() for outcome in died]
    again = run_world(resumed, 2, str(tmp_path / "saved"), settings)
    for (expected, ratio, steps), got in zip(whole, again, strict=True):
        assert differences(expected, got) == []
        assert steps == STEPS
        assert ratio > 10
    assert differences(whole[0][0]["model"], whole[1][0]["model"]) == []
    residuals = [outcome[0]["hook"]["local"] for outcome in whole]
    assert residuals[0].keys() == {"rank0"} and residuals[1].keys() == {"rank1"}


def refuses(rank: int, folder: str) -> None:
    """Assert what each thing that cannot work raises."""
    settle_in(rank)
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
    from torch.nn.parallel import DistributedDataParallel

    import ddp_core
    from commhooks.integrations.accelerate import compress

    run = Run(compressor=None)
    accelerator, prepared = run.accelerator, run.model
    own_hook: Any = commhooks.powerSGD_hook
    unprepared, without = DistributedDataParallel(nn.Linear(4, 4)), accelerator.prepare(nn.Linear(4, 4))
    twice = accelerator.prepare(ddp_core.DistributedDataParallel(nn.Linear(4, 4)))
    hook = [DistributedDataParallelKwargs(comm_hook=own_hook)]
    wrapper = [DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.BF16)]
    refused("AttachError: compress: expected an accelerate.Accelerator", compress, prepared, accelerator, "powersgd")
    refused(r"SettingsError: compress: .*\(comm_hook=...\) is set too", Run, compressor="int8", kwargs=hook)
    refused(r"SettingsError: compress: .*\(comm_wrapper=...\) is set too", Run, compressor="int8", kwargs=wrapper)
    refused("AttachError: compress: expected a DistributedDataParallel", compress, accelerator, run.module, "powersgd")
    refused("AttachError: compress: this accelerator did not prepare", compress, accelerator, unprepared, "powersgd")
    refused("AttachError: compress: DistributedDataParallel around", compress, accelerator, twice, "powersgd")
    refused("AttachError: compress: no prepared optimizer trains this", compress, accelerator, without, "powersgd")
    refused("SettingsError: DiLoCo: .* averages", DiLoCo, prepared, run.optimizer, every=9)
    kind = accelerator.state.distributed_type
    accelerator.state.distributed_type = DistributedType.FSDP
    refused(r".*: compress: expected data parallelism \(got FSDP", compress, accelerator, prepared, "powersgd")
    accelerator.state.distributed_type = kind

    late = Run(compressor=None)
    late.train(0, 1)
    late.accelerator.save_state(f"{folder}/without")
    refused("AttachError: compress: an optimizer has taken steps", compress, late.accelerator, late.model, "powersgd")
    compress(late.accelerator, late.model, "powersgd", missing="reset").close()

    run = Run(compressor="powersgd")
    assert run.attachment is not None
    refused("CheckpointError: .*missing='reset'", run.accelerator.load_state, f"{folder}/without")
    sample = torch.randn(4, 64), torch.randint(8, (4,))
    refused("NotAveragedError: SGD is about to take a step", run.step, run.module, *sample)
    run.attachment.close()
    run.accelerator.save_state(f"{folder}/detached")

    begun = Run(compressor="powersgd", missing="reset")
    begun.accelerator.load_state(f"{folder}/without")
    begun.accelerator.save_state(f"{folder}/incomplete")
    begun.accelerator.wait_for_everyone()
    if rank == 0:
        Path(folder, "incomplete", "commhooks-rank1.pt").unlink()
    begun.accelerator.wait_for_everyone()
    refused("CheckpointError: .*commhooks-rank1.pt", begun.accelerator.load_state, f"{folder}/incomplete")


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    run_world(refuses, 2, str(tmp_path))
    assert not list((tmp_path / "detached").glob("commhooks*"))


def alone(rank: int) -> str:
    settle_in(rank, 1)
    return raised(lambda: Run(compressor="powersgd"))


def test_one_process_is_refused() -> None:
    (told,) = run_world(alone, 1)
    assert told.startswith("AttachError: compress: Accelerate sees one process")


def trains_two_models(rank: int, folder: str) -> None:
    """Train two models of one accelerator; each gets its own state back."""
    settle_in(rank)
    from accelerate import Accelerator

    from commhooks.integrations.accelerate import compress

    accelerator = Accelerator(cpu=True)
    modules = [nn.Linear(64, 64) for _ in range(2)]
    prepared = [accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1)) for module in modules]
    attachments = [compress(accelerator, model, "powersgd") for model, _ in prepared]
    for model, optimizer in prepared:
        accelerator.backward(model(torch.randn(4, 64)).square().mean())
        optimizer.step()
    accelerator.save_state(folder)
    saved = [attachment.state_dict() for attachment in attachments]
    assert differences(saved[0], saved[1]) != []
    for model, _ in prepared:
        accelerator.backward(model(torch.randn(4, 64)).square().mean())
    accelerator.load_state(folder)
    assert differences(saved, [attachment.state_dict() for attachment in attachments]) == []


def test_each_of_two_models_has_its_own_state(tmp_path: Path) -> None:
    run_world(trains_two_models, 2, str(tmp_path))
    own, others = ([f"{name}-rank{rank}.pt" for rank in range(2)] for name in ("commhooks", "commhooks_1"))
    assert sorted(path.name for path in tmp_path.glob("commhooks*")) == sorted([*own, *others])


def loaded_by_three(rank: int, folder: str) -> tuple[str, int, float]:
    settle_in(rank, 3)
    strict = Run(compressor="powersgd")
    told = raised(lambda: strict.accelerator.load_state(folder))
    run = Run(compressor="powersgd", world_size="spread")
    run.accelerator.load_state(folder)
    assert run.attachment is not None
    return told, run.attachment.steps, total_residual(run.attachment, rank)


def total_residual(attachment: commhooks.Handle[Any], rank: int) -> float:
    residuals = attachment.state_dict()["local"][f"rank{rank}"]
    return sum(float(kept["residual"].double().sum()) for kept in residuals.values())


def logs(rank: int, folder: str) -> tuple[list[dict[str, float]], float]:
    """Train, log and save."""
    settle_in(rank)
    from accelerate.tracking import GeneralTracker

    class Kept(GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Keep nothing of it."""

        def log(self, values: dict[str, float], step: int | None = None, **others: Any) -> None:
            lines.append({"step": float(step or 0), **values})

    lines: list[dict[str, float]] = []
    run = Run(compressor="powersgd")
    assert run.attachment is not None
    run.accelerator.trackers = [Kept()]
    for step in range(2):
        run.train(step, step + 1)
        run.attachment.log_to(run.accelerator.log, step + 1)
    run.accelerator.save_state(folder)
    return lines, total_residual(run.attachment, rank)


def test_metrics_go_to_the_trackers_and_three_ranks_may_take_over_from_two(tmp_path: Path) -> None:
    (lines, first), (nothing, second) = run_world(logs, 2, str(tmp_path))
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["commhooks/compression_ratio"] > 10 for line in lines)
    assert nothing == []  # Accelerate logs on the main process alone

    three = run_world(loaded_by_three, 3, str(tmp_path))
    assert all("CheckpointError" in told and "world_size='spread'" in told for told, _, _ in three)
    assert [steps for _, steps, _ in three] == [2, 2, 2]
    assert sum(kept for _, _, kept in three) == pytest.approx(first + second, rel=1e-5)


def test_the_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    assert "5,752 bytes a step instead of 76,840" in train_and_resume("accelerate_ddp.py", tmp_path, "step-*")


def test_the_example_with_diloco_goes_on_in_the_middle_of_a_round(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_world(runs_a_script, 2, "accelerate_diloco.py", str(whole))
    halfway, _ = sorted(path.name for path in whole.iterdir())
    assert halfway.endswith("step-25"), "rounds are of 10 steps"
    shutil.copytree(whole / halfway, again / halfway)
    printed, nothing = run_world(runs_a_script, 2, "accelerate_diloco.py", str(again))
    found = re.match(r"steps 26 to 60: loss ([0-9.]+), ([0-9,]+) bytes a step", printed)
    assert found and not nothing, printed
    assert float(found[1]) < 0.9 and float(found[2].replace(",", "")) < 1_300, "an fp32 gradient has 76,840 bytes"


def runs_a_script(rank: int, example: str, folder: str) -> str:
    """Run an example, and return what it printed."""
    settle_in(rank)
    sys.argv = [example, folder]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "docs" / "examples" / example), run_name="__main__")
    return printed.getvalue()
