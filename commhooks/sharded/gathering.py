"""A replacement for FSDP2's all-gather: each rank sends its shards as codes, and decodes all ranks' codes.

A rank decodes its own shards too, so all ranks compute with the same weights, the ones that the codes represent. The
optimizer trains the shards themselves, at full precision.

Legend: W ranks; a row of n elements, this rank's chunk of every parameter; B blocks of b elements in it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from commhooks.compressors.cast import Cast
from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.kernels.codes import CodePlaces, passes_for, payloads_of
from commhooks.compressors.two_hop import TwoHop
from commhooks.devices import future_on, mark_of
from commhooks.errors import AttachError, SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Exchange
from commhooks.language.lending import Pool
from commhooks.language.requests import AllGather, Layout, MessageBuffer, Part
from commhooks.language.text import DTYPES, parse
from commhooks.making import make_compressor
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.lanes import Lane
from commhooks.scheduling.ledger import ParameterTraffic, Statistics, total
from commhooks.scheduling.scheduler import Scheduler
from commhooks.scheduling.task import BucketTask
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
        self.blocks = sum(coded) // block
        """B."""
        self.rest = sum(left)
        """The number of elements that are in no block."""
        self.of_blocks = Layout(tuple(names), tuple(coded))
        self.of_rest = Layout(tuple(names), tuple(left))
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


def gather_cast(dtype: torch.dtype, bucket: BucketView, ranks: int) -> Exchange:
    """Gather a row [n], the bucket's memory, in a dtype if that is narrower, into the bucket's output [W·n]."""
    row = bucket.memory
    narrows = dtype.itemsize < row.element_size()
    message = MessageBuffer([(row.shape, dtype if narrows else row.dtype)], ranks, bucket.borrow, to_all=True)
    message.places[0].copy_(row)
    (rows,) = yield AllGather(*message.parts(bucket.layout), last=True)
    bucket.mean.view(ranks, -1).copy_(rows)


def gather_codes(codec: Codec, cut: Cut, bucket: BucketView, ranks: int) -> Exchange:
    """Gather the codes of a row [n], the bucket's memory, and decode all ranks' into the bucket's output [W·n]."""
    row, rows = bucket.memory, bucket.mean.view(ranks, -1)
    kind, device = computing_dtype(row.dtype), row.device
    passes = passes_for(codec, None, kind, device)
    at_once = passes.blocks_at_once(device)
    kinds = [((cut.blocks, *shape), dtype) for shape, dtype in payloads_of(codec, kind)]
    message = MessageBuffer([*kinds, ((cut.rest,), row.dtype)], ranks, bucket.borrow, to_all=True)
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


class Gather:
    """The all-gather that FSDP2 calls for one module in place of its own, with its statistics."""

    def __init__(self, unit: Unit, code: Code, connection: ProcessGroupConnection, pool: Pool) -> None:
        self.code = code
        """The codec or dtype of the module's weights."""
        self._unit, self._connection, self._pool = unit, connection, pool
        self._before = unit.all_gather()
        held = unit.parameters(frozen=True)
        names, chunks = [one.name for one in held], [one.chunk for one in held]
        self._device = held[0].device
        self._layout = Layout(tuple(names), tuple(chunks))
        self._cut = Cut(code.block, names, chunks) if isinstance(code, Codec) else None
        self._plans: dict[Any, Any] = {}
        """Those of the bucket, which is made anew for each gather."""
        self._round = 0
        name = f"gather of {unit.name}"
        self._lane = Lane(connection.join(name), name)
        self._leave = weakref.finalize(self, connection.leave)
        self._leave.atexit = False
        self._scheduler: Scheduler | None = None

    def open(self, fingerprint: str) -> None:
        """Connect to the other ranks, which must pass the same fingerprint."""
        self._scheduler = self._connection.open(self._lane, self._device, f"{self._lane.name}\n{fingerprint}")
        self._lane.opened.result()

    def plug_in(self) -> None:
        """Register this as the module's all-gather."""
        self._unit.module.set_custom_all_gather(self)  # type: ignore[arg-type]  # it has the methods of FSDP2's class

    def detach(self) -> None:
        """Restore the module's previous all-gather, and close the lane."""
        if self.is_attached:
            self._unit.module.set_custom_all_gather(self._before)
        self.stop()

    def stop(self, why: str = "") -> None:
        """Close the lane; the connection stops with its last one, or on every rank if this one tells them `why`."""
        self._lane.is_closed = True
        if why and self._scheduler is not None and self._scheduler.failures is not None:
            self._scheduler.failures.post(why)
        self._leave()

    @property
    def is_attached(self) -> bool:
        """True while this gathers the module's weights."""
        return self._unit.is_there and self._unit.all_gather() is self

    def statistics(self) -> Statistics:
        """Return this rank's totals: a step is a gather, and its gradients are the weights of this rank's shards."""
        return self._lane.ledger.totals(self._lane.traffic)

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of the totals, by name."""
        return self._lane.ledger.by_parameter()

    def messages(self) -> list[Tensor]:
        """Return the memory of messages, which is kept between gathers and shared with the other modules'."""
        return [*self._lane.working_memory(), *self._pool.blocks()]

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
        width = sum(self._layout.sizes)
        if input_tensor.numel() != width or not input_tensor.is_floating_point():
            self._fail(
                f"FSDP2 gathers {input_tensor.numel():,} elements of {input_tensor.dtype} in place of {width:,} "
                "floating-point ones; parameters of several dtypes, or of a class that gathers something else, cannot "
                "be gathered as codes: leave out gather="
            )
        assert self._scheduler is not None, "opened before the module knows of it"
        bucket = BucketView(0, input_tensor, plans=self._plans, output=output_tensor)
        bucket.layout = self._layout  # the ledger tells layouts apart by identity
        bucket.scratch.loans.pool = self._pool
        if isinstance(self.code, Codec):
            assert self._cut is not None, "made for a codec"
            exchange = gather_codes(self.code, self._cut, bucket, self._connection.world_size)
        else:
            exchange = gather_cast(self.code, bucket, self._connection.world_size)
        task = BucketTask(
            exchange=exchange,
            bucket=bucket,
            future=future_on(input_tensor.device),
            step=self._round,
            is_last=True,
            parameters=lambda: ", ".join(self._layout.keys),
            world_size=self._connection.world_size,
            ready=mark_of(input_tensor.device),
        )
        self._round += 1
        self._scheduler.submit(self._lane, task)
        task.future.wait()
        return None

    def _fail(self, what: str) -> NoReturn:
        why = f"rank {self._connection.rank}, {self._unit.name}: {what}."
        self.stop(why)
        raise AttachError(why)


class Gathers(Mapping[str, Gather]):
    """The gathers of a model's FSDP modules, by module name; empty if FSDP2's own all-gather is used."""

    def __init__(self, gathers: Mapping[str, Gather]) -> None:
        self._of_modules = gathers

    def __getitem__(self, name: str) -> Gather:
        """Return a module's gather."""
        return self._of_modules[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the modules' names, in the order of `model.named_modules()`."""
        return iter(self._of_modules)

    def __len__(self) -> int:
        return len(self._of_modules)

    def __str__(self) -> str:
        """Return a summary: the codes of the weights, and the statistics."""
        codes = dict.fromkeys(str(gather.code) for gather in self.values())
        return f"gathers: {', '.join(codes)}\n" + str(self.statistics()).replace("gradients", "weights  ", 1)

    def statistics(self) -> Statistics:
        """Return this rank's totals; a step is the gather of one module."""
        return total(gather.statistics() for gather in self.values())

    def working_bytes(self) -> int:
        """Return the bytes of memory for messages, which is kept between gathers."""
        memories = [memory.untyped_storage() for gather in self.values() for memory in gather.messages()]
        return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of the totals, by name, frozen ones included."""
        return {name: share for gather in self.values() for name, share in gather.by_parameter().items()}
