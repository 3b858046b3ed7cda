"""Digests of what every compressor computes, to prove that a change of structure changes no bit.

    python tests/golden.py record before.json [WAY ...]     # in a copy of the old commit; of some ways in, or all
    python tests/golden.py record after.json [WAY ...]      # in the new one, on the same machine
    python tests/golden.py compare before.json after.json

Recorded for every way in and its rows, in several worlds and under its policies, for 40 steps: the means or parameters
after each step, the saved state entry by entry, and the bytes of every rank. What runs is the code of the current
folder; how it is called, `golden_ways.py` says, next to this script. No digest is kept in the repository: another
processor has others.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Digests = dict[str, dict[str, Any]]
SHOWN = 3
"""The first differences are named, and the others counted."""


def record(only: Sequence[str] = ()) -> Digests:
    """Return the digests by way, row, policy and rank; of some ways, or all."""
    sys.path.insert(0, str(Path.cwd()))
    run_world = importlib.import_module("tests.world").run_world
    ways, here = importlib.import_module("golden_ways"), importlib.import_module(Path(__file__).stem)
    found: Digests = {}
    for name, way in ways.WAYS.items():
        if only and name not in only:
            continue
        for ranks, policy in itertools.product(way.worlds, way.policies):
            of_ranks = run_world(here.digests_of_rank, ranks, name, policy, timeout=1800.0, check_exit=False)
            for rank, of_rank in enumerate(of_ranks):
                found |= {f"{name}, {row}, {policy}, rank {rank} of {ranks}": one for row, one in of_rank.items()}
        print(f"{name}: {sum(key.startswith(f'{name}, ') for key in found)} digests", flush=True)
    return found


def digests_of_rank(rank: int, name: str, policy: str) -> dict[str, dict[str, Any]]:
    """Train with every row of a way on this rank; return the digests by row."""
    way = importlib.import_module("golden_ways").WAYS[name]
    found = {}
    for row, made_with in way.rows().items():
        run = way.train(rank, made_with, policy)
        found[row] = {
            "means": [digest_of(means) for means in run.means],
            "state": {entry: digest_of([tensor]) for entry, tensor in sorted(run.state.items())},
            "traffic": run.traffic,
        }
    return found


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
        changed = [place for place, value in _places(one).items() if value != _places(other).get(place)]
        if changed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            differences.append(f"{key}: {', '.join(changed[:SHOWN])}{more}")
    return differences


def _places(digests: dict[str, Any]) -> dict[str, Any]:
    """Return each digest by what it is of: a step, an entry of the state, a number of the traffic."""
    found: dict[str, Any] = {}
    for what, values in digests.items():
        named = values.items() if isinstance(values, dict) else enumerate(values)
        found |= {f"{what} {name}": value for name, value in named}
    return found


def main(arguments: list[str]) -> int:
    """Record or compare; return 0 if nothing differs."""
    if len(arguments) > 1 and arguments[0] == "record":
        digests = record(arguments[2:])
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
