"""Digests of what every compressor computes, to prove that a change of structure changes no bit.

    python tests/golden.py record before.json       # in a copy of the old commit
    python tests/golden.py record after.json        # in the new one, on the same machine
    python tests/golden.py compare before.json after.json

Recorded for every way in of `tests/commhooks/defaults.py` with every row of `tests/cases.py`, for 40 steps: the means
or parameters after each step, the saved state and the bytes of each of 2 ranks, and of 4 if attached. No digest is in
the repository: another processor has others.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    defaults: Any = importlib.import_module("tests.commhooks.defaults")
    defaults.STEPS = STEPS
    ways = defaults.ways(list(defaults.BY_NAME), "none").items()
    return {way: digest_of(run(rank, nullcontext)) for way, run in ways if ranks == 2 or way.endswith(", attach")}


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
