"""Time fine-tuning in several ways, and count what a step sends: torchrun --nproc-per-node 2 adapters.py 10 3."""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks

WIDTH, LAYERS, WORDS = 256, 4, 64
sent: dict[str, float] = {}  # bytes that this rank has sent in a step, by way
WAYS = {  # what is trained, where, with which compressor and which gather
    "full, DDP, all-reduce": ("full", "ddp", "all-reduce", None),
    "full, DDP, int8": ("full", "ddp", "int8", None),
    "LoRA, DDP, all-reduce": ("lora", "ddp", "all-reduce", None),
    "LoRA, DDP, int8": ("lora", "ddp", "int8", None),
    "LoRA, DiLoCo every 10, int8": ("lora", "diloco", "int8", None),
    "full, FSDP2, all-reduce, gather fp32": ("full", "fsdp", "all-reduce", "fp32"),
    "LoRA, FSDP2's own": ("lora", "fsdp", None, None),
    "LoRA, FSDP2, all-reduce, gather fp32": ("lora", "fsdp", "all-reduce", "fp32"),
    "LoRA, FSDP2, all-reduce, gather int8": ("lora", "fsdp", "all-reduce", "int8"),
    "LoRA, FSDP2, base ignored": ("lora", "ignored", "all-reduce", None),
}


class LoRA(nn.Module):
    """A frozen layer, and a product of two small matrices that is trained beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the adapter computes."""
        return self.layer(x) + x @ self.down.T @ self.up.T


def transformer(trained: str) -> nn.Sequential:
    """Return a small transformer, the same on every rank."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    if trained == "lora":
        model.requires_grad_(False)
        for layer in layers:
            layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)  # type: ignore[assignment]
    return model


class Run:
    """One way to train."""

    def __init__(self, trained: str, where: str, compressor: str | None, gather: str | None) -> None:
        self.model: nn.Module = transformer(trained)
        self.handle = None
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.diloco = None
        if where == "ddp":
            self.model = DistributedDataParallel(self.model)
            self.handle = commhooks.attach(self.model, compressor)
        elif where == "diloco":
            self.diloco = commhooks.DiLoCo(self.model, self.optimizer, every=10, compressor=compressor)
            self.handle = self.diloco.exchange
        else:
            frozen = {p for p in self.model.parameters() if not p.requires_grad}
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*self.model[1:-1], self.model):
                fully_shard(module, mesh=mesh, ignored_params=frozen if where == "ignored" else None)
            self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
            if compressor is not None:
                self.handle = commhooks.attach_sharded(self.model, compressor, gather=gather)

    def seconds(self, steps: int) -> float:
        """Train, and return the mean time of a step."""
        dist.barrier()
        begin = time.perf_counter()
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            words = torch.randint(WORDS, (4, 32), generator=generator)
            logits = self.model(words)
            nn.functional.cross_entropy(logits.flatten(0, 1), (words + 3).flatten() % WORDS).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.diloco is not None:
                self.diloco.step()
        dist.barrier()
        return (time.perf_counter() - begin) / steps


def main(steps: int, rounds: int) -> None:
    """Take so many steps in each way, in turn, in each round, and print a table."""
    dist.init_process_group("gloo")
    runs = {name: Run(*way) for name, way in WAYS.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(run.seconds(steps))
    baseline = taken[next(iter(runs))]
    if dist.get_rank() == 0:
        print("| way | bytes sent a step | seconds a step | full, all-reduce over it |\n| --- | ---: | ---: | ---: |")
    for name, run in runs.items():
        if run.handle is not None:
            sent[name] = run.handle.statistics().moved_bytes / (steps * rounds)
        ratios = [first / own for first, own in zip(baseline, taken[name], strict=True)]
        spread = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        if dist.get_rank() == 0:
            counted = f"{sent[name]:,.0f}" if name in sent else "not counted"
            print(f"| {name} | {counted} | {statistics.median(taken[name]):.3f} | {spread} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
