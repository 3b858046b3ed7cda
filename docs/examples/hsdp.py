"""Train on two nodes, compressed between them: torchrun --nnodes 2 --nproc-per-node 8 ... hsdp.py checkpoints 40."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commhooks

NODES, SAVE_EVERY, BATCHES, WORDS = 2, 20, 4, 64
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
shape = (NODES, dist.get_world_size() // NODES)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(WORDS, 32), *blocks, nn.Linear(32, WORDS))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in (*blocks, model):
    fully_shard(module, mesh=mesh["shard"], mp_policy=policy)  # HSDP: mesh=mesh
between = commhooks.attach_replicas(model, "powersgd:rank=4", process_group=mesh["replicate"].get_group())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
between.watch(optimizer)

first = max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
if first:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / f"step-{first}")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    commhooks.load_distributed(folder / f"step-{first}", between)  # not from a checkpoint of HSDP
for step in range(first, steps):
    for number in range(BATCHES):
        is_last = number == BATCHES - 1
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        generator = torch.Generator().manual_seed(1000 * (BATCHES * step + number) + dist.get_rank())
        words = torch.randint(WORDS, (8, 16), generator=generator)
        logits = model(words).float()
        (nn.functional.cross_entropy(logits.flatten(0, 1), (words + 3).flatten() % WORDS) / BATCHES).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % SAVE_EVERY == 0:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer, "hooks": between.state_dict()}
        dcp.save(state, checkpoint_id=folder / f"step-{step + 1}")
if dist.get_rank() == 0:
    print(between.statistics())
between.close()
dist.destroy_process_group()
