"""Digests of what every compressor computes, to prove that a change of structure changes no bit.

    python /path/to/new/tests/golden.py record before.json     # from the folder of the old commit
    python tests/golden.py record after.json                   # from the folder of the new one, on the same machine
    python tests/golden.py compare before.json after.json

Recorded for every row of the table of cases, on 1, 2 and 4 ranks, under both policies, for 40 steps: the means, the
state and the bytes of every rank. The code that runs is that of the current folder; this script uses only what users
use. No digest is kept in the repository: another processor has others.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = [(64, 48), (48,), (40, 3, 3, 3), (5,), (0, 4), (), (30, 40), (7, 1), (1, 90), (33, 65)]
STEPS = 40
WORLD_SIZES = (1, 2, 4)
POLICIES = ("fifo", "fused")
Digests = dict[str, dict[str, Any]]


def record() -> Digests:
    """Return the digests of every case, by case, number of ranks and policy."""
    sys.path.insert(0, str(Path.cwd()))
    run_world = importlib.import_module("tests.world").run_world
    here = importlib.import_module(Path(__file__).stem)  # as ranks can import it, from this script's folder
    found: Digests = {}
    for world_size, policy in itertools.product(WORLD_SIZES, POLICIES):
        for rank, of_rank in enumerate(run_world(here.digests_of_rank, world_size, policy, timeout=1800.0)):
            for name, digests in of_rank.items():
                found[f"{name}, {policy}, rank {rank} of {world_size}"] = digests
    return found


def digests_of_rank(rank: int, policy: str) -> dict[str, dict[str, Any]]:
    """Train with every case on this rank; return the digests by case."""
    cases = importlib.import_module("tests.cases").CASES
    return {case.name: _train(rank, case.make(), policy) for case in cases}


def _train(rank: int, compressor: Any, policy: Any) -> dict[str, Any]:
    import commhooks
    from tests.commhooks.models import Given, wrap

    module = Given(*SHAPES)
    model = wrap("core", module, bucket_cap_mb=0.02)
    handle = commhooks.attach(model, compressor, policy=policy)
    means = []
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(1000 * rank + step)
        model(*(torch.randn(shape, generator=generator) for shape in SHAPES)).backward()
        means.append(digest_of(p.grad for p in module.parameters() if p.grad is not None))
    counted = handle.statistics()
    state = sorted(digest_of([tensor]) for tensor in tensors_in(handle.state_dict()))
    handle.detach()
    traffic = [counted.collectives, counted.payload_elements, counted.payload_bytes, counted.moved_bytes]
    return {"means": means, "state": state, "traffic": traffic}


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def digest_of(tensors: Iterable[Tensor]) -> str:
    bits = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        bits.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def compare(before: Digests, after: Digests) -> list[str]:
    """Return what differs, in words; what is new is no difference."""
    differences = [f"{key}: not there any more" for key in before.keys() - after.keys()]
    for key in sorted(before.keys() & after.keys()):
        one, other = before[key], after[key]
        changed = [what for what in one if one[what] != other.get(what)]
        if changed:
            differences.append(f"{key}: {', '.join(changed)}")
    return differences


def main(arguments: list[str]) -> int:
    """Record or compare; return 0 if nothing differs."""
    if len(arguments) == 2 and arguments[0] == "record":
        digests = record()
        Path(arguments[1]).write_text(json.dumps(digests, indent=1))
        print(f"{len(digests)} digests of {importlib.import_module('commhooks').__file__}")
        return 0
    if len(arguments) == 3 and arguments[0] == "compare":
        before, after = (json.loads(Path(path).read_text()) for path in arguments[1:])
        differences = compare(before, after)
        print("\n".join(differences) or f"{len(before)} digests are equal")
        return int(bool(differences))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
