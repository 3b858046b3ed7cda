"""Shard a model block by block, compress, resume: torchrun --nproc-per-node 2 sharded_blocks.py checkpoints 40."""

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

SAVE_EVERY, PARTS, WORDS = 20, 2, 64
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))

torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(WORDS, 32), *blocks, nn.Linear(32, WORDS))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in (*blocks, model):
    fully_shard(module, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
attachment = commhooks.attach_sharded(model, "int8")
attachment.watch(optimizer)

first = max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
if first:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / f"step-{first}")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    commhooks.load_distributed(folder / f"step-{first}", attachment)
for step in range(first, steps):
    for part in range(PARTS):
        model.set_requires_gradient_sync(part == PARTS - 1)
        generator = torch.Generator().manual_seed(1000 * (PARTS * step + part) + dist.get_rank())
        words = torch.randint(WORDS, (8, 16), generator=generator)
        logits = model(words).float()
        (nn.functional.cross_entropy(logits.flatten(0, 1), (words + 3).flatten() % WORDS) / PARTS).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % SAVE_EVERY == 0:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer, "hooks": attachment.state_dict()}
        dcp.save(state, checkpoint_id=folder / f"step-{step + 1}")
if dist.get_rank() == 0:
    print(f"{attachment.steps} steps, each rank sent {attachment.statistics().moved_bytes:,} bytes")
attachment.close()
dist.destroy_process_group()
