"""`commhooks.integrations.transformers` under the real library: a tiny GPT-2, two ranks, Gloo, processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.huggingface import die, differences, settle_in, what_it_became
from tests.world import run_world, run_world_outcomes

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(240)]

STEPS, SAVED_AT = 12, 6
PLAIN: dict[str, Any] = {"compressor": "powersgd"}
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
        model=GPT2LMHeadModel(config), args=TrainingArguments(**(usual | arguments)), train_dataset=samples
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
