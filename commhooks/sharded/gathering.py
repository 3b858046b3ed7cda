"""A replacement for FSDP2's all-gather: each rank sends its shards as codes, and decodes all ranks' codes.

A rank decodes its own shards too, so all ranks compute with the same weights, the ones that the codes represent. The
optimizer trains the shards themselves, at full precision.

Legend: W ranks; a row of n elements, this rank's chunk of every parameter; B blocks of b elements in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from commhooks.compressors.cast import Cast
from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.kernels.codes import CodePlaces, passes_for, payloads_of
from commhooks.compressors.two_hop import TwoHop
from commhooks.engine.engine import Engine
from commhooks.engine.rows import RowsBucket
from commhooks.errors import AttachError, SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.lending import Pool
from commhooks.language.requests import AllGather, Layout, MessageBuffer, Part
from commhooks.language.text import DTYPES, parse
from commhooks.making import make_compressor
from commhooks.scheduling.connection import Connection
from commhooks.scheduling.ledger import ParameterTraffic, Statistics, total
from commhooks.sharded.fsdp import Unit
from commhooks.tensors import computing_dtype
from commhooks.wrappers.error_feedback import ErrorFeedback, WithoutFeedback

Code = Codec | torch.dtype
"""The form in which weights are sent: as codes of blocks, or in a dtype."""


def code_of(gather: Code | str) -> Code:
    """Return the codec or dtype for weights; `gather` may name it: "int8", "int4:block=64", "bf16", "fp32".

    Named codes that can round to the nearest do so unless `stochastic` is given.

    Raises:
        SettingsError: There is no such code, or it suits gradients only, or draws random numbers, or does not show
            values that are not finite.

    """
    code: object = DTYPES.get(gather, gather) if isinstance(gather, str) else gather
    if isinstance(code, str):
        written = dict(parse(code, "gather").settings)
        code = _within(make_compressor(code))
        if isinstance(code, Codec):
            own = {field.name for field in dataclasses.fields(code)}
            if unused := sorted(written.keys() - own):
                raise SettingsError(
                    f"attach_sharded(gather={gather!r}): {unused[0]!r} is a setting for gradients, not for a "
                    f"gather; it takes {', '.join(sorted(own))}."
                )
            if code.draws and "stochastic" in own - written.keys():
                code = type(code)(**vars(code) | {"stochastic": False})
    if isinstance(code, torch.dtype) and code.is_floating_point and code.itemsize >= 2:
        return code
    if not isinstance(code, Codec):
        raise SettingsError(
            f"attach_sharded(gather={gather!r}): expected a code of blocks, such as 'int8', 'fp8', 'int4' or 'mxfp4', "
            "or a floating-point dtype of at least 16 bits, such as 'bf16'; other compressors average gradients."
        )
    if code.draws:
        raise SettingsError(
            f"attach_sharded(gather={gather!r}): {code!r} draws random numbers, so forward and backward pass would "
            "compute with different weights; use a code that rounds to the nearest, such as 'int8'."
        )
    if not code.shows_non_finite:
        raise SettingsError(f"attach_sharded(gather={gather!r}): the codes of {code!r} do not show inf and NaN.")
    return code


def _within(compressor: object) -> object:
    """Return the codec of two hops, the dtype of a cast, or any other compressor itself; error feedback is removed."""
    if isinstance(compressor, ErrorFeedback | WithoutFeedback):
        compressor = compressor.inner
    if isinstance(compressor, TwoHop):
        return compressor.codec
    return compressor.dtype if isinstance(compressor, Cast) else compressor


def check_can_be_gathered(unit: Unit, code: Code) -> None:
    """Raise `SettingsError` for a module whose weights cannot be sent in this form."""
    for one in unit.parameters(frozen=True):
        is_exact = isinstance(code, torch.dtype) and code.itemsize >= one.gathered_in.itemsize
        if one.is_packed and one.gathered_in.is_floating_point and not is_exact:
            raise SettingsError(
                f"attach_sharded(gather={code}): {one.name!r}, of shape {tuple(one.shape)}, holds codes of its "
                "layer's weights, which would be coded a second time and destroyed. Leave out gather: codes are small "
                "already. Or pass them to fully_shard's ignored_params."
            )


class Span(NamedTuple):
    """Neighbouring elements of a row, and their place in the message."""

    first: int
    """The number of the first element in the row."""
    elements: int
    sent: int
    """The number of the first element among the elements of all blocks, or of the rest."""


class Cut:
    """The division of a row into whole blocks, each of one parameter's elements, and a rest, which is sent uncoded."""

    def __init__(self, block: int, names: Sequence[str], chunks: Sequence[int]) -> None:
        coded = [chunk - chunk % block for chunk in chunks]
        left = [chunk % block for chunk in chunks]
        self.block = block
        """b."""
        self.blocks: int = sum(coded) // block
        """B."""
        self.rest: int = sum(left)
        """The number of elements that are in no block."""
        self.of_blocks: Layout = Layout(tuple(names), tuple(coded))
        self.of_rest: Layout = Layout(tuple(names), tuple(left))
        self.coded: list[Span] = []
        """The runs that are whole blocks."""
        self.plain: list[Span] = []
        """The runs that are the rest."""
        first = of_blocks = of_rest = 0
        for whole, others in zip(coded, left, strict=True):
            _append(self.coded, Span(first, whole, of_blocks))
            _append(self.plain, Span(first + whole, others, of_rest))
            first, of_blocks, of_rest = first + whole + others, of_blocks + whole, of_rest + others

    def pieces(self, at_once: int, rank: int, device: torch.device) -> Iterator[tuple[slice, CodePlaces]]:
        """Yield slices of at most `at_once` blocks' elements, with the blocks' places in a rank's message."""
        for run in self.coded:
            begin, end = run.sent // self.block, (run.sent + run.elements) // self.block
            for block in range(begin, end, at_once):
                rows = torch.arange(block, min(block + at_once, end), dtype=torch.int64, device=device)
                first = run.first + (block - begin) * self.block
                places = CodePlaces(torch.full_like(rows, rank), rows, rows + rank * self.blocks)
                yield slice(first, first + len(rows) * self.block), places


def _append(runs: list[Span], run: Span) -> None:
    """Append a run that is not empty: to the last one, if they are neighbours."""
    if run.elements and runs and runs[-1].first + runs[-1].elements == run.first:
        runs[-1] = runs[-1]._replace(elements=runs[-1].elements + run.elements)
    elif run.elements:
        runs.append(run)


@dataclasses.dataclass(frozen=True)
class GatherCast(Compressor):
    """Gathers the ranks' rows, the memory [n], into the output [W·n], in a dtype if that is narrower; no average."""

    code: torch.dtype

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Request all rows, cast."""
        row, ranks = bucket.memory, context.world_size
        dtype = min(row.dtype, self.code, key=lambda dtype: dtype.itemsize)
        message = MessageBuffer([(row.shape, dtype)], ranks, bucket.borrow, to_all=True)
        message.places[0].copy_(row)
        (rows,) = yield AllGather(*message.parts(bucket.layout), last=True)
        bucket.mean.view(ranks, -1).copy_(rows)


@dataclasses.dataclass(frozen=True)
class GatherCodes(Compressor):
    """Gathers the codes of the ranks' rows, the memory [n], and decodes them into the output [W·n]; no average."""

    code: Codec
    cut: Cut = dataclasses.field(repr=False)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Request the codes of all rows, and what is in no block."""
        cut, row, rows = self.cut, bucket.memory, bucket.mean.view(context.world_size, -1)
        kind, device = computing_dtype(row.dtype), row.device
        passes = passes_for(self.code, None, kind, device)
        at_once = passes.blocks_at_once(device)
        kinds = [((cut.blocks, *shape), dtype) for shape, dtype in payloads_of(self.code, kind)]
        message = MessageBuffer([*kinds, ((cut.rest,), row.dtype)], len(rows), bucket.borrow, to_all=True)
        *codes, rest = message.places
        of_one_rank = [code.unsqueeze(0) for code in codes]
        for own, places in cut.pieces(at_once, 0, device):
            passes.send(row[own].to(kind).view(-1, cut.block), None, of_one_rank, places, keeps=False)
        for run in cut.plain:
            rest[run.sent : run.sent + run.elements] = row[run.first : run.first + run.elements]
        parts = [Part(code, cut.of_blocks, rows=message) for code in codes]
        *gathered, rests = yield AllGather(*parts, Part(rest, cut.of_rest, rows=message), last=True)  # each [W, ...]

        for rank, of_rank in enumerate(rows):
            for own, places in cut.pieces(at_once, rank, device):
                blocks = of_rank[own].view(-1, cut.block)
                room = blocks if blocks.dtype == kind else torch.empty_like(blocks, dtype=kind)
                decoded = passes.write(gathered, places, room)
                if decoded is not blocks:
                    blocks.copy_(decoded)
        for run in cut.plain:
            rows[:, run.first : run.first + run.elements] = rests[:, run.sent : run.sent + run.elements]


class OfDtype(NamedTuple):
    """The parameters of a module that are gathered in one dtype."""

    dtype: torch.dtype
    numbers: Sequence[int]
    """Their numbers among all."""
    like: Sequence[Tensor]
    chunks: Sequence[int]
    """The elements that a row has of each."""
    engine: Engine | None
    """What runs their gather; None: FSDP2's own all-gather does, as they hold no floating-point numbers."""


class Gather:
    """The all-gather that FSDP2 calls for one module in place of its own, with its statistics.

    FSDP2 gathers parameters of several dtypes together, as bytes. Then each dtype has an exchange of its own here.
    """

    def __init__(self, unit: Unit, code: Code, connection: Connection, facts: str, pool: Pool) -> None:
        held = unit.parameters(frozen=True)
        dtypes = [one.gathered_in for one in held]
        self.code = code
        """The codec or dtype of the module's weights."""
        self._unit = unit
        self._before = unit.all_gather()
        self._bytes = [one.chunk * dtype.itemsize for one, dtype in zip(held, dtypes, strict=True)]
        """The bytes that a row has of each parameter."""
        self._parts = list[OfDtype]()
        for dtype in dict.fromkeys(dtypes):
            numbers = [number for number, own in enumerate(dtypes) if own is dtype]
            names, chunks = tuple(held[one].name for one in numbers), tuple(held[one].chunk for one in numbers)
            like = [held[one].like() for one in numbers]
            engine = None
            if dtype.is_floating_point:
                codes = (
                    GatherCodes(code, Cut(code.block, names, chunks)) if isinstance(code, Codec) else GatherCast(code)
                )
                engine = Engine(
                    codes,
                    connection,
                    fingerprint=f"{facts}\ngathered in {', '.join(map(str, dtypes))}",
                    by_parameter=False,
                    policy="fifo",
                    name=f"gather of {unit.name}" + (f" in {dtype}" if len(numbers) < len(held) else ""),
                )
                engine.bind([*zip(names, like, strict=True)])
                engine.buckets.layouts[sum(chunks)] = Layout(names, chunks)
                engine.buckets.pool = pool
            self._parts.append(OfDtype(dtype, numbers, like, chunks, engine))

    @property
    def engines(self) -> list[Engine]:
        """What runs it, one for each dtype of floating-point numbers."""
        return [part.engine for part in self._parts if part.engine is not None]

    def detach(self) -> None:
        """Restore the module's previous all-gather, and close the channel."""
        if self.is_attached:
            self._unit.set_all_gather(self._before)
        for engine in self.engines:
            engine.stop()

    @property
    def is_attached(self) -> bool:
        """True while this gathers the module's weights."""
        return self._unit.is_there and self._unit.all_gather() is self

    def statistics(self) -> Statistics:
        """Return this rank's totals: a step is a gather, and its gradients are the weights of this rank's shards."""
        counts = [engine.statistics() for engine in self.engines]
        return dataclasses.replace(total(counts), steps=max((one.steps for one in counts), default=0))

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of the totals, by name."""
        return {name: share for one in self.engines for name, share in one.channel.ledger.by_parameter().items()}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory for the weights of all ranks."""
        with torch.inference_mode(mode=False):  # what is allocated there can be written there only, not on our thread
            return torch.empty(*size, dtype=dtype, device=device)

    @_disable_dynamo  # a compiled training step would trace the exchange
    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Write every rank's row, as the codes represent it, in the order of the current stream.

        If another group gathers (`reshard_after_forward` is a number), weights are decoded already, so the previous
        all-gather runs.
        """
        if group is not self._unit.process_group:  # reshard_after_forward=number
            return self._before(output_tensor, input_tensor, group, async_op)
        first, *others = self._parts
        if not others:
            self._check(input_tensor, first.dtype, sum(first.chunks))
            return self._run(first, output_tensor, input_tensor, group)
        self._check(input_tensor, torch.uint8, sum(self._bytes))
        own, wholes = input_tensor.split(self._bytes), output_tensor.view(group.size(), -1).split(self._bytes, 1)
        for part in self._parts:  # in memory of its own, as bytes side by side are not aligned
            row = torch.cat([own[number] for number in part.numbers]).view(part.dtype)
            rows = self.allocate((group.size(), row.numel()), dtype=part.dtype, device=row.device)
            self._run(part, rows.view(-1), row, group)
            sizes = [self._bytes[number] for number in part.numbers]
            for number, whole in zip(part.numbers, rows.view(torch.uint8).split(sizes, 1), strict=True):
                wholes[number].copy_(whole)
        return None

    def _run(self, part: OfDtype, rows: Tensor, row: Tensor, group: dist.ProcessGroup) -> Any:
        if part.engine is None:
            return self._before(rows, row, group)
        part.engine.run(RowsBucket(row, rows, part.like, part.chunks)).wait()
        return None

    def _check(self, row: Tensor, dtype: torch.dtype, elements: int) -> None:
        if row.numel() != elements or row.is_floating_point() != dtype.is_floating_point:
            text = (
                f"FSDP2 gathers {row.numel():,} elements of {row.dtype} in place of {elements:,} of {dtype}; if "
                "parameters changed their dtype, close and attach again; those of a class that gathers something else "
                "cannot be gathered as codes: leave out gather="
            )
            for engine in self.engines[:1]:
                engine.fail(text)
            raise AttachError(f"{self._unit.name}: {text}")


class Gathers(dict[str, Gather]):
    """The gathers of a model's FSDP modules, by name, as in `named_modules`; empty if FSDP2's own are used."""

    def __str__(self) -> str:
        """Return a summary: the codes of the weights, and the statistics."""
        codes = dict.fromkeys(str(gather.code) for gather in self.values())
        return f"gathers: {', '.join(codes)}\n" + str(self.statistics()).replace("gradients", "weights  ", 1)

    def statistics(self) -> Statistics:
        """Return this rank's totals; a step is the gather of one module."""
        return total(gather.statistics() for gather in self.values())

    def working_bytes(self) -> int:
        """Return the bytes of memory for messages, which is kept between gathers."""
        memories = [
            memory.untyped_storage()
            for gather in self.values()
            for engine in gather.engines
            for memory in engine.working_memory()
        ]
        return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of the totals, by name, frozen ones included."""
        return {name: share for gather in self.values() for name, share in gather.by_parameter().items()}
