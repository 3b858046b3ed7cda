"""Train with compressed gradients under Hugging Face's Trainer, and resume where an earlier run stopped.

torchrun --nproc-per-node 2 trainer_ddp.py checkpoints/trainer_ddp
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import commhooks
from commhooks.integrations.transformers import CompressGradients

LENGTH = 64


def main(folder: Path) -> None:
    """Train from the newest checkpoint in the folder, if there is one, up to the last step."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_steps=60,
        save_steps=20,
        logging_steps=20,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    texts = torch.arange(LENGTH) + torch.randint(64, (1024, 1))  # counting, from anywhere
    samples = [{"input_ids": text % 64, "labels": text % 64} for text in texts]

    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    compressor = commhooks.make_compressor("powersgd", rank=2, start_after=10)
    hooks = CompressGradients(compressor).add_to(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)

    last = hooks.attachment.last_step()
    if trainer.is_world_process_zero() and last.payload_bytes:
        print(f"{last.payload_bytes:,} bytes a step instead of {last.gradient_bytes:,}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints/trainer_ddp"))
