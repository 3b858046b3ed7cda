"""Train with compressed gradients under Hugging Face Accelerate, and resume where an earlier run stopped.

torchrun --nproc-per-node 2 accelerate_ddp.py checkpoints/accelerate_ddp
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks.integrations.accelerate import compress

STEPS = 60
SAVE_EVERY = 20


def main(folder: Path) -> None:
    """Train from the newest checkpoint in the folder, if there is one, up to the last step."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(accelerator.num_processes * 128 * STEPS, 64)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=128)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hooks = compress(accelerator, model, commhooks.make_compressor("powersgd", rank=2, start_after=10))

    first = max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
    if first:
        accelerator.load_state(str(folder / f"step-{first}"))
    for step, (batch, labels) in enumerate(accelerator.skip_first_batches(loader, first), first + 1):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / f"step-{step}"))

    if first < STEPS:
        last = hooks.last_step()
        accelerator.print(
            f"steps {first + 1} to {STEPS}: loss {loss.item():.3f}, {last.payload_bytes:,} bytes a step instead of "
            f"{last.gradient_bytes:,}"
        )
    hooks.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints/accelerate_ddp"))
