"""Train a sharded model with Lightning, compressed: torchrun --nproc-per-node 2 lightning_sharded.py."""

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import commhooks


class Classifier(L.LightningModule):
    """A small network, sharded layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def configure_model(self) -> None:
        """Shard it; Lightning calls this once its ranks have met."""
        for layer in (*self.net[::2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class CompressShards(L.Callback):
    """Attach a compressor while the model is trained."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Attach, and let a step of the optimizer on gradients that bypassed the compressor raise."""
        self.attachment = commhooks.attach_sharded(module, "int8")
        self.attachment.watch(*trainer.optimizers)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Say what was sent, and detach."""
        if trainer.is_global_zero:
            counted = self.attachment.statistics()
            print(f"{self.attachment.steps} steps, messages {counted.ratio:.1f} times smaller")
        self.attachment.close()


torch.manual_seed(0)
inputs = torch.randn(1024, 64)
loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), 32)
strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
without = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, callbacks=[CompressShards()], max_epochs=2, **without
)
trainer.fit(Classifier(), loader)
