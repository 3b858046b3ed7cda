"""Train with DiLoCo in PyTorch Lightning: torchrun --nproc-per-node 2 lightning_diloco.py; run it again to resume."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from commhooks.integrations.lightning_diloco import DiLoCoStrategy, TrainWithDiLoCo


class Classifier(pl.LightningModule):
    """A small network, trained as any LightningModule is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of one batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        """Log the loss of one batch, at the outer copies."""
        self.log("held_out", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's own model."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0)
inputs = torch.randn(1280, 64)
data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))  # something that can be learned
training, held_out = torch.utils.data.random_split(data, [1024, 256])
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 6
last = Path("checkpoints/lightning_diloco/last.ckpt")

diloco = TrainWithDiLoCo(every=10, compressor="int4", fragments=2, delay=1)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DiLoCoStrategy(),
    max_epochs=epochs,
    callbacks=[diloco, ModelCheckpoint(dirpath=last.parent, save_last=True)],
    logger=False,
)
loaders = DataLoader(training, 32, shuffle=True), DataLoader(held_out, 32)  # Lightning gives each rank a half of each
trainer.fit(Classifier(), *loaders, ckpt_path=last if last.exists() else None)

counts = diloco.diloco.statistics()
if trainer.is_global_zero:
    loss = trainer.callback_metrics["held_out"]
    print(f"step {counts.steps}: held-out loss {loss:.3f}, {counts.bytes_per_step:,.0f} bytes a step, as a rank sends")
