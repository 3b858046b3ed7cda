"""Train with DiLoCo under Hugging Face Accelerate, and resume where an earlier run stopped.

torchrun --nproc-per-node 2 accelerate_diloco.py checkpoints/accelerate_diloco
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks

STEPS, EVERY, SAVE_EVERY, ACCUMULATE = 60, 10, 25, 2


def main(folder: Path) -> None:
    """Train from the newest checkpoint in the folder, if there is one, up to the last step."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs = torch.randn(accelerator.num_processes * 64 * ACCUMULATE * STEPS, 64)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=64)

    model = accelerator.prepare_model(model, evaluation_mode=True)  # on its device, without a DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer, loader = accelerator.prepare(optimizer, loader)  # each rank gets batches of its own
    diloco = commhooks.DiLoCo(model, optimizer, every=EVERY, compressor="int4")
    parts = {"model": model, "optimizer": optimizer.optimizer, "scaler": accelerator.scaler, "hooks": diloco}

    commhooks.load_checkpoint(folder, **parts)
    first = diloco.steps
    for batch, labels in accelerator.skip_first_batches(loader, ACCUMULATE * first):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:  # the optimizer took a step, or left it out because of an inf
            diloco.step()
            if diloco.steps % SAVE_EVERY == 0:
                commhooks.save_checkpoint(folder, step=diloco.steps, **parts)  # each rank's own, and what all share

    with diloco.outer_parameters():
        loss = nn.functional.cross_entropy(
            model(inputs[:256].to(accelerator.device)), inputs[:256, :10].argmax(1).to(accelerator.device)
        )
    sent = diloco.statistics().bytes_per_step
    accelerator.print(f"steps {first + 1} to {diloco.steps}: loss {loss.item():.3f}, {sent:,.0f} bytes a step")
    diloco.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints/accelerate_diloco"))
