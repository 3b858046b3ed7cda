"""The step of a model that FSDP2 shards: gathers of parameters, and a reduce-scatter of gradients, for each module.

A rank keeps a part of the first dimension of each parameter, padded to the same size on every rank. Of N elements in
all, a rank of W sends (W-1)/W · N in each of

    a gather in the forward pass
    a gather in the backward pass    of blocks; the rest of the model stays gathered in between
    a reduce-scatter                 what a compressor sends in its place

Over Gloo, FSDP2 waits for each of these before it computes on. In the step-time model what is exchanged is a `Bucket`,
whose answer is due at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.kernels.codes import payloads_of
from commhooks.experiments.timing.link import OF_PYTORCH
from commhooks.experiments.timing.payloads import rounds_of_shards
from commhooks.experiments.timing.step_time import Bucket, Sends, Stage, Step
from commhooks.language.compressor import Compressor
from commhooks.scheduling.channels import HEADER_BYTES

Shape = tuple[int, ...]

FORWARD_SHARE = 1 / 3  # of compute; the backward pass costs about twice as much
PLAIN = "torch.none"
"""Plain FSDP2, among hooks."""
_AGREED = (("all-gather", HEADER_BYTES),)
"""The messages by which ranks agree on whose turn it is, if several modules share a line."""


@dataclasses.dataclass(frozen=True)
class ShardedModule:
    """A module that FSDP2 gathers and reduces by itself."""

    trained: tuple[Shape, ...]
    """Shapes of its parameters that have gradients."""
    frozen: tuple[Shape, ...] = ()
    """Shapes of its other parameters, which are gathered too."""
    item: int = 4
    """Bytes of an element."""
    stays: bool = False
    """True if its parameters stay in memory between the forward and the backward pass, as the root's do."""

    @property
    def elements(self) -> int:
        """The number of elements of its parameters."""
        return sum(map(math.prod, (*self.trained, *self.frozen)))

    def shard_bytes(self, ranks: int, code: Codec | torch.dtype | None = None) -> int:
        """Return the bytes that each rank puts into a gather: of its shards, or of their codes."""
        chunks = [_chunk(shape, ranks) for shape in (*self.trained, *self.frozen)]
        if isinstance(code, Codec):
            block = sum(math.prod(shape) * dtype.itemsize for shape, dtype in payloads_of(code, torch.float32))
            return sum(chunk // code.block * block + chunk % code.block * self.item for chunk in chunks)
        return sum(chunks) * (self.item if code is None else min(self.item, code.itemsize))


@dataclasses.dataclass(frozen=True)
class ShardCosts:
    """The seconds that a compressor takes for the gradients of a whole step, before its first round and after."""

    before: float
    after: float
    elements: int

    def of_module(self, shapes: Sequence[Shape]) -> tuple[float, float]:
        """Return a module's share of the seconds before the first round and after it."""
        share = sum(map(math.prod, shapes)) / self.elements
        return share * self.before, share * self.after


def _chunk(shape: Shape, ranks: int) -> int:
    """Return how many elements of a parameter each rank keeps, with padding."""
    return -(-shape[0] // ranks) * math.prod(shape[1:]) if shape else 1


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded separately: those in the model's outermost `ModuleList`s and `Sequential`s.

    Modules without a matrix are left out, as an exchange of their own costs more than their bytes, and so are modules
    that share a parameter with another one.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = []
    for block in _listed(model):
        named = [*block.named_parameters(remove_duplicate=False)]
        own = Counter(id(parameter) for _, parameter in named)
        if any(p.dim() > 1 for _, p in named) and all(uses[one] == times for one, times in own.items()):
            found.append(block)
    return found


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_list:
            yield child
        else:
            yield from _listed(child)


def modules_of(model: nn.Module) -> list[ShardedModule]:
    """Return the modules of a model whose blocks, and then itself, are passed to `fully_shard`; the last is the rest.

    The rest is left out if there are no parameters in it.
    """
    blocks = blocks_of(model)
    place = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    of_module: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 1)]
    for parameter in model.parameters():
        of_module[place.get(id(parameter), -1)].append(parameter)
    return [
        ShardedModule(
            trained=tuple(tuple(p.shape) for p in own if p.requires_grad),
            frozen=tuple(tuple(p.shape) for p in own if not p.requires_grad),
            item=own[0].element_size(),
            stays=number == len(blocks),
        )
        for number, own in enumerate(of_module)
        if own
    ]


def sharded_step(
    modules: Sequence[ShardedModule],
    compressor: Compressor | None,
    ranks: int,
    *,
    compute: float,
    optimizer: float = 0.0,
    costs: ShardCosts | None = None,
    copy: float = 0.0,
    cores: int = 1,
    gather: Codec | torch.dtype | None = None,
) -> Step:
    """Return a rank's step, with the exchanges of each module.

    Args:
        modules: In the order of the forward pass, the root last.
        compressor: The replacement of FSDP2's reduce-scatter; None: plain FSDP2.
        ranks: The number of ranks that share the model.
        compute: Seconds of the forward and the backward pass, of which a third is forward; each module takes its share
            by elements.
        optimizer: Seconds.
        costs: The compressor's costs, None: it takes no time.
        copy: Seconds to copy one fp32 element: FSDP2 copies what it gathers and reduces.
        cores: The cores of each rank.
        gather: The code or dtype in which parameters are gathered, whose own time is not counted; None: FSDP2 gathers
            them.

    Raises:
        SettingsError: The compressor cannot return shards.

    """
    order = [*(module for module in modules if module.stays), *(module for module in modules if not module.stays)]
    seconds = [compute * module.elements / max(sum(one.elements for one in order), 1) for module in order]
    channels = sum(bool(module.trained) for module in order) + (len(order) if gather is not None else 0)
    is_agreed = compressor is not None and channels > 1
    rounds = {module: _rounds(module, compressor, ranks) for module in dict.fromkeys(order)}  # blocks are often alike
    buckets, now = list[Bucket](), 0.0
    for module, own in zip(order, seconds, strict=True):  # the forward pass
        buckets.append(_gather(module, ranks, copy, gather, now))
        now += FORWARD_SHARE * own
    for module, own in reversed([*zip(order, seconds, strict=True)]):
        if not module.stays:
            buckets.append(_gather(module, ranks, copy, gather, now))
        now = min(compute, now + (1 - FORWARD_SHARE) * own)
        if module.trained:
            buckets.append(_reduction(module, rounds[module], ranks, costs, copy, now, is_agreed=is_agreed))
    buckets.sort(key=lambda bucket: bucket.ready)
    return Step(compute=compute, optimizer=optimizer, buckets=tuple(buckets), cores=cores)


def _gather(module: ShardedModule, ranks: int, copy: float, code: Codec | torch.dtype | None, now: float) -> Bucket:
    shard = module.shard_bytes(ranks)
    copies, sends = copy * shard / 4, (f"all-gather{OF_PYTORCH}", shard)
    stages = [Stage(copies, (sends,))]
    if code is not None:  # ranks agree on whose turn it is, and gather in private groups
        stages = [Stage(0.0, _AGREED), Stage(copies, (("all-gather", module.shard_bytes(ranks, code)),))]
    return Bucket(now, tuple(stages), ranks * copies, due=now)


def _reduction(
    module: ShardedModule,
    rounds: Sequence[Sends],
    ranks: int,
    costs: ShardCosts | None,
    copy: float,
    now: float,
    *,
    is_agreed: bool,
) -> Bucket:
    """Return the exchange of a module's gradients, which FSDP2 copies into rows before, and from its row afterwards."""
    row = _row_bytes(module, ranks)
    before, after = copy * ranks * row / 4, copy * row / 4
    if costs is not None:
        first, second = costs.of_module(module.trained)
        before, after = before + first, after + second
    agreed = (_AGREED,) if is_agreed else ()
    stages = [Stage(0.0, sends) for sends in (*agreed, *rounds)]
    stages[-1] = Stage(before, stages[-1].collectives)
    return Bucket(now, tuple(stages), after, due=now)


def _rounds(module: ShardedModule, compressor: Compressor | None, ranks: int) -> Sequence[Sends]:
    """Return the collectives of each round of a module's reduction: PyTorch's own, or a compressor's."""
    if compressor is None:
        return (((f"reduce-scatter{OF_PYTORCH}", ranks * _row_bytes(module, ranks)),),)
    dtype = torch.float32 if module.item == 4 else torch.bfloat16
    gradients = {
        str(number): torch.zeros(shape, dtype=dtype, device="cpu") for number, shape in enumerate(module.trained)
    }
    return rounds_of_shards(compressor, gradients, ranks) if gradients else ()


def _row_bytes(module: ShardedModule, ranks: int) -> int:
    """Return the bytes of the gradients that each rank keeps."""
    return module.item * sum(_chunk(shape, ranks) for shape in module.trained)
