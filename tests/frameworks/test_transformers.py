"""`commhooks.integrations.transformers` under the real library: a tiny GPT-2, two ranks, Gloo, processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.huggingface import die, differences, settle_in, train_and_resume, what_it_became
from tests.frameworks.launch import refused
from tests.world import run_world, run_world_outcomes

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(240)]

STEPS, SAVED_AT = 12, 6
PLAIN: dict[str, Any] = {"compressor": "powersgd", "eval_strategy": "steps", "eval_steps": 3}
AS_PEOPLE_TRAIN = {
    "compressor": "powersgd",
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "bf16": True,
    "gradient_checkpointing": True,
    "torch_compile": True,
    "torch_compile_backend": "eager",
}


def trainer_of(folder: str, *, kind: type | None = None, **arguments: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    texts = torch.randint(64, (128, 32), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": text, "labels": text} for text in texts]
    usual: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "logging_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "disable_tqdm": True,
    }
    return (kind or Trainer)(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**(usual | arguments)),
        train_dataset=samples,
        eval_dataset=samples[:8],
    )


def begin(rank: int, folder: str, *, compressor: str, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    settle_in(rank)
    from commhooks.integrations.transformers import CompressGradients

    trainer = trainer_of(folder, **arguments)
    return trainer, CompressGradients(compressor, **(options or {})).add_to(trainer)


def train(rank: int, folder: str, settings: dict[str, Any], kill: bool, resume: bool | str | None) -> dict[str, Any]:
    from transformers import TrainerCallback

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if kill and state.global_step == SAVED_AT + 1:
                die()

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            became.update(what_it_became(trainer.model, compress.attachment))

    became: dict[str, Any] = {}
    trainer, compress = begin(rank, folder, **settings)
    trainer.callback_handler.callbacks.insert(0, End())  # before the hook is detached
    trainer.train(resume_from_checkpoint=resume)
    counted = compress.attachment.statistics()
    assert not compress.attachment.is_attached
    return {
        "became": became,
        "ratio": counted.ratio,
        "steps": compress.attachment.steps,
        "log": trainer.state.log_history,
    }


@pytest.mark.parametrize("settings", [PLAIN, AS_PEOPLE_TRAIN], ids=["plain", "as-people-train"])
def test_a_killed_run_goes_on_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = run_world(train, 2, str(tmp_path / "whole"), settings, False, None, timeout=100)
    died = run_world_outcomes(train, 2, str(tmp_path / "run"), settings, True, None, timeout=100)
    assert [outcome.exit_code for outcome in died] == [-9, -9], [outcome.describe() for outcome in died]
    again = run_world(train, 2, str(tmp_path / "run"), settings, False, True, timeout=100)
    for expected, got in zip(whole, again, strict=True):
        assert differences(expected["became"], got["became"]) == []
        assert expected["steps"] == got["steps"] == STEPS
        assert expected["ratio"] > 10
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-12", "checkpoint-6"]


class CallsTheModule:
    """A Trainer that leaves the DistributedDataParallel out, as one that overrides too much may."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = model.module(**inputs).loss
        loss.backward()
        return loss.detach()


def refuses(rank: int, folder: str) -> None:
    """Assert what cannot work, in runs of two steps."""
    settle_in(rank)
    from transformers import Trainer

    import ddp_core
    from commhooks.integrations.transformers import CompressGradients

    def begun(name: str, **arguments: Any) -> Any:
        usual: dict[str, Any] = {"compressor": "powersgd", "max_steps": 2, "save_steps": 2}
        return begin(rank, f"{folder}/{name}", **(usual | arguments))[0]

    dense = trainer_of(f"{folder}/without", max_steps=2, save_steps=2)
    dense.train()
    callback = CompressGradients("powersgd")
    refused(r"AttachError: .*: expected a transformers.Trainer \(got GPT2LMHeadModel", callback.add_to, dense.model)
    given: dict[str, Any] = {"model": dense.model, "args": dense.args, "callbacks": [callback]}
    refused("AttachError: CompressGradients does not know its Trainer", Trainer, **given)
    refused("AttachError: CompressGradients.add_to: a model has one hook", callback.add_to, begun("twice"))
    without = begun("without", max_steps=4)
    refused("CheckpointError: .*missing='reset'", without.train, resume_from_checkpoint=True)
    begun("without", max_steps=4, options={"missing": "reset"}).train(resume_from_checkpoint=True)

    first = begun("first", save_steps=1, save_total_limit=1)
    first.train()
    first.train()  # once more, from the beginning: attached anew
    kept = f"{folder}/first/checkpoint-2"
    other = begun("other", max_steps=4)
    refused("CheckpointError: could not find the checkpoint..*resume_from=", other.train, resume_from_checkpoint=kept)
    begun("other", max_steps=4, options={"resume_from": kept}).train(resume_from_checkpoint=kept)

    wrapped, hooked = begun("wrapped"), begun("hooked")
    wrapped.model = wrapped.model_wrapped = ddp_core.DistributedDataParallel(wrapped.model)
    hooked.accelerator.ddp_handler.comm_hook = "fp16"
    another = begun("first", max_steps=4, compressor="top-k")
    refused("CheckpointError: rank ", another.train, resume_from_checkpoint=True)
    alone = begun("alone", kind=type("Own", (CallsTheModule, Trainer), {}))
    refused("NotAveragedError: AdamW is about to take a step", alone.train)
    refused("AttachError: attach: DistributedDataParallel around DistributedDataParallel", wrapped.train)
    refused(r"SettingsError: .*: DistributedDataParallelKwargs\(comm_hook=...\) is set", hooked.train)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    run_world(refuses, 2, str(tmp_path), timeout=100)
    # Of two checkpoints one was to be kept, and the hook's files of the other went with it.
    kept = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("commhooks*"))
    assert kept == [Path("checkpoint-2", f"commhooks-rank{rank}.pt") for rank in range(2)]


def logged(rank: int, folder: str) -> list[dict[str, float]]:
    settle_in(rank)
    options = {"by_parameter": True}
    trainer, _ = begin(rank, folder, compressor="powersgd", options=options, max_steps=4, save_steps=4)
    trainer.train()
    return [line for line in trainer.state.log_history if "commhooks/compression_ratio" in line]


def test_metrics_are_logged_with_the_losses(tmp_path: Path) -> None:
    for lines in run_world(logged, 2, str(tmp_path)):
        assert [line["step"] for line in lines] == [2, 4]
        for line in lines:
            assert line["commhooks/compression_ratio"] > 10
            assert line["commhooks/residual_norm_over_gradient_norm"] > 0
            assert line["commhooks/bytes_sent_total/transformer.wte.weight"] > 0


def test_the_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    assert "25,600 bytes a step instead of 433,152" in train_and_resume("trainer_ddp.py", tmp_path, "checkpoint-*")
