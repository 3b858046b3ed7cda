"""Train with PyTorch Lightning, compressed: torchrun --nproc-per-node 2 lightning_ddp.py; run it again to resume."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks.integrations.lightning import CompressGradients


class Classifier(pl.LightningModule):
    """A small network, trained as any LightningModule is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of one batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


pl.seed_everything(0)
inputs = torch.randn(256, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)  # something that can be learned
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 6
last = Path("checkpoints/lightning_ddp/last.ckpt")

compress = CompressGradients(commhooks.make_compressor("powersgd", rank=2))
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=epochs,
    callbacks=[compress, ModelCheckpoint(dirpath=last.parent, save_last=True)],
    logger=False,
)
trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, labels), 32), ckpt_path=last if last.exists() else None)

counted = compress.attachment.statistics()
if trainer.is_global_zero:
    print(f"step {trainer.global_step}: a rank sent {counted.moved_bytes:,} bytes, {counted.ratio:.1f} times fewer")
