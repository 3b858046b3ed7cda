"""Per-rank state for a different number of ranks: sums over ranks are spread, and shares are redistributed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from commhooks.language.entries import blocks_served
from commhooks.state.table import Entries, Kinds


def spread(
    local: Mapping[int, Entries], old_size: int, rank: int, new_size: int, kinds: Kinds, *, times: float
) -> Entries:
    """Return the state of one of `new_size` ranks, so that its sum over them is `times` the sum over `old_size`.

    If there are fewer ranks, new rank r takes the sum over old ranks r, r + new_size, and so on. If there are more, an
    old rank's state is divided equally among the new ranks whose number modulo `old_size` is its own. Shares are left
    out.
    """
    takers = 1 if new_size <= old_size else len(range(rank % old_size, new_size, old_size))
    givers = range(rank, old_size, new_size) if new_size <= old_size else [rank % old_size]
    sums: Entries = {}
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    for giver in givers:
        for name, entries in local[giver].items():
            own = sums.setdefault(name, {})
            for entry, kept in entries.items():
                if kinds[name][entry].kind == "share":
                    continue
                taken = kept.double() * times / takers
                own[entry] = own[entry] + taken if entry in own else taken
                dtypes[name, entry] = kept.dtype
    return {name: {e: total.to(dtypes[name, e]) for e, total in own.items()} for name, own in sums.items()}


def deal_again(
    local: Mapping[int, Entries], old_size: int, rank: int, new_size: int, kinds: Kinds, *, times: float
) -> Entries:
    """Return one of `new_size` ranks' shares, for the blocks that it serves now, multiplied by `times`."""
    dealt: Entries = {}
    for name, declared in kinds.items():
        for entry, holders in ((e, what.holders) for e, what in declared.items() if what.kind == "share"):
            of_servers = [local[old][name][entry] for old in range(0, old_size, holders)]  # each [blocks served, block]
            blocks = sum(len(kept) for kept in of_servers)
            whole = of_servers[0].new_empty(blocks, of_servers[0].shape[1])
            for server, kept in enumerate(of_servers):
                whole[list(blocks_served(name, blocks, server, len(of_servers)))] = kept
            served = list(blocks_served(name, blocks, rank // holders, new_size // holders))
            dealt.setdefault(name, {})[entry] = (whole[served].double() * times).to(whole.dtype)
    return dealt
