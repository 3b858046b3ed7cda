"""Train with Lightning Fabric, compressed: torchrun --nproc-per-node 2 fabric_ddp.py; run it again to resume."""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks.integrations.fabric import compress

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
inputs = torch.randn(256, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)  # something that can be learned
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, labels), 32))

model, optimizer = fabric.setup(net, optimizer)
hooks = compress(fabric, model, optimizer, commhooks.make_compressor("powersgd", rank=2))

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 6
last = Path("checkpoints/fabric_ddp/last.ckpt")
state = {"model": model, "optimizer": optimizer, "hooks": hooks, "epoch": 0}
if last.exists():
    fabric.load(last, state)

for epoch in range(state["epoch"], epochs):
    for batch, target in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(batch), target))
        optimizer.step()
    state["epoch"] = epoch + 1
    fabric.save(last, state)  # on every rank

counted = hooks.attachment.statistics()
fabric.print(f"epoch {epochs}: a rank sent {counted.moved_bytes:,} bytes, {counted.ratio:.1f} times fewer")
hooks.end()
