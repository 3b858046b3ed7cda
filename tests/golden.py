"""Digests of what every compressor computes, to prove that a change of structure changes no bit.

    python tests/golden.py record before.json       # in a copy of the old commit
    python tests/golden.py record after.json        # in the new one, on the same machine
    python tests/golden.py compare before.json after.json

Recorded for every row of `tests/cases.py` attached to both DDPs and in an Exchanger, for DiLoCo, ModelAverager and
FSDP2's shards and replicas: the means or parameters after each of 40 steps, the saved state and the bytes of each of 2
ranks, and of 4 if attached. No digest is in the repository: another processor has others.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 40


def record() -> dict[str, str]:
    """Return digests by way, row and rank, of the code of the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    run_world, here = importlib.import_module("tests.world").run_world, importlib.import_module("tests.golden")
    found: dict[str, str] = {}
    for ranks in (2, 4):
        for rank, of_rank in enumerate(run_world(here.digests_of_rank, ranks, ranks, timeout=3600.0, check_exit=False)):
            found |= {f"{way}, rank {rank} of {ranks}": one for way, one in of_rank.items()}
    return found


def digests_of_rank(rank: int, ranks: int) -> dict[str, str]:
    defaults: Any = importlib.import_module("tests.commhooks.test_defaults")
    defaults.STEPS = STEPS
    names = list(defaults.BY_NAME)
    found = {f"{name}, attach, PyTorch's DDP": digest_of(attached(rank, name)) for name in names}
    if ranks == 4:
        return found
    found |= defaults.digests(rank, "none", names)
    for way, shape in (("attach_replicas", (2, 1)), ("attach_sharded", (1, 2))):
        for compressor in ("all-reduce", "fp16", "top-k:ratio=0.1", "int8", "sign"):
            found[f"{way}, {compressor}"] = digest_of(sharded(rank, way, shape, compressor))
    return found


def attached(rank: int, name: str) -> Iterator[Tensor]:
    """Attach a row to a model in PyTorch's DDP, where all buckets make a unit."""
    defaults, commhooks = importlib.import_module("tests.commhooks.test_defaults"), importlib.import_module("commhooks")
    module = defaults.Given(*defaults.SHAPES)
    model = defaults.wrap("torch", module, bucket_cap_mb=0.004)
    handle = commhooks.attach(model, defaults.BY_NAME[name].make(), policy="fused")
    for step in range(STEPS):
        model.zero_grad()
        model(*defaults.gradients(rank, step)).backward()
        yield from defaults.gradients_of(module)
    yield from tensors_in(handle.state_dict())
    handle.close()


def sharded(rank: int, way: str, shape: tuple[int, int], compressor: str) -> Iterator[Tensor]:
    """Train two layers that FSDP2 shards, or replicas of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 65), nn.Tanh(), nn.Linear(65, 7))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh["shards"])
    group = {"process_group": mesh.get_group("replicas")} if way == "attach_replicas" else {}
    handle = getattr(importlib.import_module("commhooks"), way)(model, compressor, **group)
    for step in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * rank + step))).square().mean().backward()
        yield from (shard.grad.to_local() for shard in model.parameters())  # type: ignore[union-attr]
    yield from tensors_in(handle.state_dict())
    handle.close()


def digest_of(tensors: Iterable[Tensor]) -> str:
    bits = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        bits.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a saved state, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def main(arguments: list[str]) -> int:
    """Record or compare; return 0 if nothing differs. What is new is no difference."""
    if len(arguments) == 2 and arguments[0] == "record":
        digests = record()
        Path(arguments[1]).write_text(json.dumps(digests, indent=1))
        print(f"{len(digests)} digests of {importlib.import_module('commhooks').__file__}")
        return 0
    if len(arguments) == 3 and arguments[0] == "compare":
        before, after = (json.loads(Path(path).read_text()) for path in arguments[1:])
        differ = [
            f"{way}: {'differs' if way in after else 'is gone'}" for way in before if before[way] != after.get(way)
        ]
        print("\n".join(differ) or f"{len(before)} digests are equal")
        return int(bool(differ))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
