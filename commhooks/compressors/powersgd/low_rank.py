"""A low-rank compressor's preparations for a bucket's matrices: their factors, and the products with them.

Matrices of one shape and rank form a group, whose factors are one batch; a stack, such as the fused weights of experts,
is several of them. On a CPU, groups of fp32 matrices of rank up to 8 are multiplied by compiled passes, one call for
all of a bucket's matrices. Otherwise large matrices are multiplied one by one: on a CPU in blocks of rows that stay in
the cores' caches, on a GPU in one call, since each is a kernel that the host must launch. Small ones are copied side by
side and multiplied by one call, since a call takes longer than their arithmetic.

Legend: M n×m a gradient plus its residual; P r×n the left factor and Q r×m the right one, both kept transposed, since
products along rows of M are faster; r the rank; k the number of matrices in a group.

Every rank multiplies the same mean factors, and must get the same bits. On a CPU `product` therefore has a fixed order,
which compiled passes share, whatever the processor. A rank's own factors, M·Qᵀ and P·M, may differ in their last bits:
the residual takes the difference.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from commhooks.compressors.powersgd.blind_rows import Probe, replace_blind_rows, with_probes
from commhooks.compressors.powersgd.matrices import MatrixForm
from commhooks.compressors.powersgd.precision import in_full
from commhooks.devices import runs_later
from commhooks.language import BucketView, Context, Layout, Part, Slot, Tile, lending
from commhooks.language.memory import surely
from commhooks.language.tile import TileStack, form_together, to_form
from commhooks.native.low_rank import MOST_RANK, LowRankKernels, MatrixGroup, MatrixMemory, Probes, level_for
from commhooks.tensors import computing_dtype

Item = TypeVar("Item")
Plan = TypeVar("Plan")
Side = Literal["P", "Q"]
OTHER: dict[Side, Side] = {"P": "Q", "Q": "P"}

BLOCK_ELEMENTS = 1 << 18
"""Large matrices are processed in blocks of rows, of at most this many elements per thread, but at least one row."""
STACK_ELEMENTS = 1 << 16
"""Small matrices are copied side by side until they have this many elements."""
SMALL_ELEMENTS = 1 << 12
"""Vectors of at most this many elements become one part: copying them takes less time than sending each by itself."""
TILE_ROWS = 16
"""The number of rows that a BLAS multiplies at once, or a multiple of it."""


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankMatrix:
    """A matrix, or a stack of matrices, that is sent as factors."""

    key: str
    """Seeds the bases."""
    form: MatrixForm
    r: int
    tile: Tile
    home: Slot
    """Holds the bases."""
    layout: Layout | None = None
    """The parameters that own its elements, if not all are `home`'s."""

    @property
    def kind(self) -> Hashable:
        """The common properties of a group's matrices."""
        return self.form, self.r, self.tile.keeps, TileStack.takes(self.tile), self.is_plain, self.layout

    @property
    def is_plain(self) -> bool:
        """True if compiled passes can multiply it."""
        return not self.form.transposed and self.r <= MOST_RANK and self.tile.memory is not None

    @property
    def memory(self) -> MatrixMemory:
        """The memory of a plain matrix."""
        assert self.tile.memory is not None, "it is plain"
        gradient, residual, mean = (
            one if one is None else self.form.view(one.view(-1)[: self.form.elements]) for one in self.tile.memory
        )
        assert gradient is not None and mean is not None
        return MatrixMemory(gradient, residual, mean)

    def stacks(self, at_once: int) -> list[LowRankMatrix]:
        """Return a stack in stacks of at most this many matrices; a single one is a matrix."""
        n, m, is_transposed, stack = self.form
        assert stack is not None, "it is a stack"
        flat = self.tile.rows(MatrixForm(stack, n * m), at_once)
        sizes = [len(tile.gradient) for tile in flat]
        forms = [MatrixForm(n, m, is_transposed, None if size == 1 else size) for size in sizes]
        return [dataclasses.replace(self, form=form, tile=tile) for form, tile in zip(forms, flat, strict=True)]


class Factors(NamedTuple):
    """A matrix as the product P·Q, or k matrices."""

    P: Tensor
    """n×r, or k×n×r."""
    Q: Tensor
    """r×m, or k×r×m."""

    def at(self, place: int | slice) -> Factors:
        """Return one of the k matrices, or several."""
        return Factors(self.P[place], self.Q[place])


class _Block(NamedTuple):
    """Some rows of a matrix, as views that are created once."""

    tile: Tile
    """rows×m."""
    P: Tensor
    """r×rows: the matching columns of the matrix's P."""


class _Banded:
    """A matrix in blocks of rows."""

    def __init__(self, x: LowRankMatrix, place: int, P: Tensor, Q: Tensor) -> None:
        self.place: int | slice = place
        n, m, *_ = x.form
        self._block_rows = n if runs_later(P) else min(n, rows_of_a_block(m, x.r, torch.get_num_threads()))
        self.tiles = x.tile.rows(x.form, self._block_rows)
        self._blocks = list(map(_Block, self.tiles, P.split(self._block_rows, dim=1)))
        self._Q = Q

    def multiply(self, side: Side, probe: Probe | None) -> None:
        """Compute this rank's own factor of one side: M times the factor of the other side; for P, also the probe."""
        if side == "P":
            for number, block in enumerate(self._blocks):
                M, first = block.tile.form(), number * self._block_rows
                torch.mm(self._Q, M.t(), out=block.P)  # r×m · m×rows
                if probe:
                    torch.mv(M, probe.direction, out=probe.shown[first : first + len(M)])
        elif len(self._blocks) == 1:
            torch.mm(self._blocks[0].P, self.tiles[0].form(), out=self._Q)  # r×n · n×m
        else:
            self._Q.zero_()
            for block in self._blocks:
                self._Q.addmm_(block.P, block.tile.form())  # r×rows · rows×m

    @property
    def elements_at_once(self) -> int:
        """The most elements of M that a call handles."""
        return self.tiles[0].gradient.numel()

    def finish(self, mean: Factors, sent: Factors, finite: Tensor, spare: Tensor | None) -> None:
        """Write the mean, and keep M minus this rank's sent part as the residual."""
        for (tile, rows), sent_rows in zip(self._with_rows(mean), sent.P.split(self._block_rows), strict=True):
            if tile.keeps:
                left = tile.residual_room(finite)
                torch.addmm(tile.form(), sent_rows, sent.Q, alpha=-1, out=left)
                tile.keep(left, finite)
            tile.write(product(rows, mean.Q, tile.room, spare))

    def write(self, mean: Factors, spare: Tensor | None) -> None:
        for tile, rows in self._with_rows(mean):
            tile.write(product(rows, mean.Q, tile.room, spare))

    def largest(self, mean: Factors, spare: Tensor | None) -> Tensor:
        """Return the mean's largest magnitude, 0-dim; this overwrites what was formed."""
        blocks = [product(rows, mean.Q, tile.room, spare).abs().amax() for tile, rows in self._with_rows(mean)]
        return torch.stack(blocks).amax()

    def _with_rows(self, mean: Factors) -> Iterator[tuple[Tile, Tensor]]:
        """Return each block's tile, and its rows of P."""
        return zip([block.tile for block in self._blocks], mean.P.split(self._block_rows), strict=True)


class _SideBySide:
    """Several matrices in one tensor: small ones, which are copied there, or the matrices of a stack."""

    def __init__(self, matrices: Sequence[LowRankMatrix], first: int, P: Tensor, Q: Tensor) -> None:
        self.place: int | slice = slice(first, first + len(P))
        n, _, _, stack = matrices[0].form
        self.tiles = [tile for x in matrices for tile in x.tile.rows(x.form, stack or n)]
        self._stack = TileStack(self.tiles, apart=runs_later(P)) if stack is None else self.tiles[0]
        self._P, self._Q = P, Q

    def multiply(self, side: Side, probe: Probe | None) -> None:
        M = self._stack.form()
        if side == "P":
            torch.bmm(self._Q, M.mT, out=self._P)
            if probe:
                torch.mv(M.flatten(end_dim=1), probe.direction, out=probe.shown.view(-1))
        else:
            torch.bmm(self._P, M, out=self._Q)

    @property
    def elements_at_once(self) -> int:
        return sum(tile.gradient.numel() for tile in self.tiles)

    def finish(self, mean: Factors, sent: Factors, finite: Tensor, spare: Tensor | None) -> None:
        if self._stack.keeps:
            M, left = self._stack.form(), self._stack.residual_room(finite)
            self._stack.keep(torch.baddbmm(M, sent.P, sent.Q, alpha=-1, out=left), finite)
        self.write(mean, spare)

    def write(self, mean: Factors, spare: Tensor | None) -> None:
        self._stack.write(product(mean.P, mean.Q, self._stack.room, spare))

    def largest(self, mean: Factors, spare: Tensor | None) -> Tensor:
        return product(mean.P, mean.Q, self._stack.room, spare).abs().amax()


class LowRankGroup:
    """Matrices of one shape and rank, with their factors."""

    def __init__(self, matrices: Sequence[LowRankMatrix], level: str | None) -> None:
        first, of_one = matrices[0], matrices[0].form.matrices
        (n, m, *_), r, gradient = first.form, first.r, first.tile.gradient
        self.matrices: Sequence[LowRankMatrix]
        self.r: int
        self.matrices, self.r, k = matrices, r, len(matrices) * of_one
        self._runs_later = runs_later(gradient)
        self.P = gradient.new_zeros(k, r, n, dtype=computing_dtype(gradient.dtype))
        self.Q = gradient.new_zeros(k, r, m, dtype=self.P.dtype)
        keys = tuple(x.home.name for x in matrices)
        factors: dict[Side, Tensor] = {"P": self.P, "Q": self.Q}
        self.parts: dict[Side, Part] = {
            side: Part(own, first.layout or Layout(keys, (own[0].numel() * of_one,) * len(keys)))
            for side, own in factors.items()
        }
        self.places: dict[Side, tuple[Tensor, ...]] = {side: own.split(of_one) for side, own in factors.items()}
        """Each matrix's or stack's factors."""
        self.is_compiled: bool = level is not None and first.is_plain
        self.products: list[_Banded | _SideBySide] = []
        at = 0
        for own in [] if self.is_compiled else self._together():
            end = at + sum(x.form.matrices for x in own)
            P, Q = self.P[at:end], self.Q[at:end]
            is_one = len(P) == 1
            self.products.append(_Banded(own[0], at, P[0], Q[0]) if is_one else _SideBySide(own, at, P, Q))
            at = end

    def _together(self) -> Iterator[Sequence[LowRankMatrix]]:
        """Yield the matrices that one call multiplies."""
        first = self.matrices[0]
        size = first.form.n * first.form.m
        if first.form.stack is None:
            is_small = size <= SMALL_ELEMENTS and TileStack.takes(first.tile)
            most = STACK_ELEMENTS // size if is_small else 1
            yield from (self.matrices[at : at + most] for at in range(0, len(self.matrices), most))
        elif self._runs_later:
            yield from ([x] for x in self.matrices)
        else:
            yield from ([part] for x in self.matrices for part in x.stacks(max(1, BLOCK_ELEMENTS // size)))

    def factor(self, side: Side) -> Tensor:
        """Return P or Q."""
        return self.P if side == "P" else self.Q

    def multiply(self, side: Side, turn: int, probe: Probe | None = None) -> None:
        """Compute this rank's own factors of one side: each M times its factor of the other side; and maybe a probe."""
        for one in there_and_back(self.products, turn):
            one.multiply(side, probe and probe.at(one.place))

    def finish(self, side: Side, mean: Tensor, sent: Tensor, turn: int, finite: Tensor, spare: Tensor | None) -> None:
        """Write means and residuals, given the mean factors of the last side and this rank's sent ones."""
        of_mean = self._of_means(side, mean)
        # The other side's factor is a basis that all ranks share, so what a rank sent stands for its product with that.
        # No residual would hold the products' rounding error.
        of_sent = Factors(*in_full(*self._factors(side, sent)))
        for one in there_and_back(self.products, turn):
            one.finish(of_mean.at(one.place), of_sent.at(one.place), finite, spare)

    def write(self, side: Side, mean: Tensor, spare: Tensor | None) -> None:
        """Write means, given the mean factors of one side."""
        of_mean = self._of_means(side, mean)
        for one in self.products:
            one.write(of_mean.at(one.place), spare)

    def largest(self, side: Side, mean: Tensor, spare: Tensor | None) -> Tensor:
        """Return the means' largest magnitude, 0-dim; this overwrites what was formed."""
        of_mean = self._of_means(side, mean)
        return torch.stack([one.largest(of_mean.at(one.place), spare) for one in self.products]).amax()

    def _factors(self, side: Side, mean: Tensor) -> Factors:
        """Return the factors, of which one side's is `mean`, with P as columns, which products on a CPU read faster."""
        P, Q = (mean, self.Q) if side == "P" else (self.P, mean)
        return Factors(P.mT if self._runs_later else P.mT.contiguous(), Q)

    def _of_means(self, side: Side, mean: Tensor) -> Factors:
        factors = self._factors(side, mean)
        return Factors(*in_full(*factors)) if self._runs_later else factors


class _Compiled:
    """The groups that are multiplied by compiled passes, one call for all of them."""

    def __init__(self, groups: Sequence[LowRankGroup], level: str) -> None:
        self._places = [at for at, group in enumerate(groups) if group.is_compiled]
        own = self.of(groups)
        # Tuples, which the kernels check once.
        self._P, self._Q = tuple(group.P for group in own), tuple(group.Q for group in own)
        self._tiles = [x.tile for group in own for x in group.matrices]
        self._kernels = LowRankKernels(
            level, [MatrixGroup(group.r, [x.memory for x in group.matrices]) for group in own]
        )

    def of(self, items: Sequence[Item]) -> list[Item]:
        """Return the items of these groups, among those of all groups of the plan."""
        return [items[at] for at in self._places]

    def multiply(self, side: Side, probes: Probes | None = None) -> None:
        """Compute this rank's own factors of one side; maybe also each M times a probe's direction."""
        if side == "P":
            decay = self._tiles[0].decay
            self._kernels.left(self._Q, self._P, decay=decay, forms=to_form(self._tiles), probes=probes)
        else:
            form_together(self._tiles)
            self._kernels.right(self._P, self._Q)

    def finish(self, side: Side, means: Sequence[Tensor], sent: Sequence[Tensor], finite: Tensor) -> None:
        """Write means and residuals, as `LowRankGroup.finish`."""
        if side == "Q":
            self._write(self._P, sent, means, keeps=surely(finite))
        else:
            if surely(finite):
                self._kernels.finish(sent, self._Q, self._Q)  # for the residual: the mean follows
            self.write(side, means)

    def write(self, side: Side, means: Sequence[Tensor]) -> None:
        """Write means, as `LowRankGroup.write`."""
        P, Q = (means, self._Q) if side == "P" else (self._P, means)
        self._write(P, Q, Q, keeps=False)

    def _write(self, P: Sequence[Tensor], sent: Sequence[Tensor], means: Sequence[Tensor], *, keeps: bool) -> None:
        self._kernels.finish(P, sent, means, keeps=keeps)
        if lending.IS_CHECKED:
            for tile in self._tiles:
                tile.write(tile.mean)


class Uncompressed:
    """The tiles that are averaged uncompressed: small ones side by side as one part, and a part for each other tile."""

    def __init__(self, tiles: Sequence[Tile], wire: torch.dtype | None) -> None:
        small = [tile for tile in tiles if _is_small(tile)]
        is_worth_it = len(small) > 1
        self._others = [tile for tile in tiles if not (is_worth_it and _is_small(tile))]
        self._small = [tile.gradient.view(-1) for tile in small] if is_worth_it else []
        self._means = [tile.mean.view(-1) for tile in small]
        self._sizes = [gradient.numel() for gradient in self._small]
        self._parts = [Part(tile.gradient, tile.layout, wire) for tile in self._others]
        if self._small:
            keys = tuple(key for tile in small for key in tile.layout.keys)
            sizes = tuple(size for tile in small for size in tile.layout.sizes)
            together = self._small[0].new_empty(sum(self._sizes))
            self._parts.append(Part(together, Layout(keys, sizes), wire))

    def parts(self) -> Sequence[Part]:
        """Return this step's parts."""
        if self._small:
            torch.cat(self._small, out=self._parts[-1].tensor)
        return self._parts

    def write(self, means: Sequence[Tensor]) -> None:
        """Write the mean of each part."""
        for tile, mean in zip(self._others, means[: len(self._others)], strict=True):
            tile.write(mean)
        if self._small:
            torch._foreach_copy_(self._means, list(means[-1].split(self._sizes)))


class LowRankPlan:
    """A bucket's matrices in groups, and the tiles that are sent uncompressed."""

    def __init__(self, matrices: Sequence[LowRankMatrix], rest: Sequence[Tile], level: str | None) -> None:
        self.level = level
        """The level of compiled passes; None: everything runs eagerly."""
        self._group(matrices)
        # Sent together with factors, the rest is as wide as they are; sent alone, it keeps its own dtype.
        self.rest: Uncompressed = Uncompressed(rest, self.groups[0].P.dtype if self.groups else None)

    def _group(self, matrices: Sequence[LowRankMatrix]) -> None:
        self.matrices = matrices
        alike: dict[Hashable, list[LowRankMatrix]] = {}
        for x in matrices:
            alike.setdefault(x.kind, []).append(x)
        # Ranks exchange factors in this order, so it does not depend on the level.
        self.groups: list[LowRankGroup] = [LowRankGroup(of_kind, self.level) for of_kind in alike.values()]
        self._eager = [at for at, group in enumerate(self.groups) if not group.is_compiled]
        has_compiled = self.level is not None and len(self._eager) < len(self.groups)
        self._compiled = _Compiled(self.groups, self.level) if self.level is not None and has_compiled else None
        most = max((one.elements_at_once for group in self.groups for one in group.products), default=0)
        is_queued = bool(self.groups) and runs_later(self.groups[0].P)
        self._spare = None if is_queued or not most else self.groups[0].P.new_empty(most)
        """Memory for one column of P times one row of Q, kept from step to step."""
        self.rows: Tensor | None = _rows_of_right_factors(self.groups)
        """The row number of each element of all groups' Q, one group's after another's, if work is queued: all groups
        are then handled in one call. None otherwise."""

    @classmethod
    def of_slots(
        cls,
        bucket: BucketView,
        form_of: Callable[[Tensor, str], MatrixForm | None],
        rank: Callable[[MatrixForm], int],
        level: str | None,
    ) -> LowRankPlan:
        """Make a matrix of each parameter that has a form, with its rank; the rest stays uncompressed."""
        forms = [(slot, form_of(slot.parameter, slot.name)) for slot in bucket.slots]
        matrices = [
            LowRankMatrix(slot.name, form, min(form.n, form.m, rank(form)), slot.tile, slot)
            for slot, form in forms
            if form
        ]
        return cls(matrices, [slot.tile for slot, form in forms if form is None], level)

    def at(self, ranks: Sequence[int]) -> LowRankPlan:
        """Return the plan for the same matrices with other ranks."""
        plan = copy.copy(self)
        plan._group([dataclasses.replace(x, r=r) for x, r in zip(self.matrices, ranks, strict=True)])
        return plan

    def factors(self, side: Side) -> list[Tensor]:
        """Return each group's P or Q."""
        return [group.factor(side) for group in self.groups]

    def multiply(self, side: Side, turn: int) -> None:
        """Compute this rank's own factors of one side."""
        if self.rows is not None:
            self._form_at_once()
        if self._compiled is not None:
            self._compiled.multiply(side)
        for at in there_and_back(self._eager, turn):
            self.groups[at].multiply(side, turn)

    def multiply_and_compare(self, seed: int) -> None:
        """Compute this rank's own P, in which a probe's product replaces blind rows."""
        if self.rows is not None:
            self._form_at_once()
        probed = with_probes([(group.P, group.Q) for group in self.groups], seed)
        if self._compiled is not None:
            own = self._compiled.of([one.probe for one in probed])
            self._compiled.multiply("P", Probes([one.direction for one in own], [one.shown for one in own]))
        for at in self._eager:
            self.groups[at].multiply("P", 0, probed[at].probe)
        replace_blind_rows(probed)

    def _form_at_once(self) -> None:
        """Form all matrices in few calls; on a CPU each is formed when it is multiplied, so that it is in the cache."""
        form_together([tile for group in self.groups for one in group.products for tile in one.tiles])

    def finish(self, side: Side, means: Sequence[Tensor], turn: int, context: Context, finite: Tensor) -> None:
        """Write means and residuals, from the mean factors of the last side and this rank's own ones."""
        sent = [context.as_sent(own) for own in self.factors(side)]
        if self._compiled is not None:
            self._compiled.finish(side, self._compiled.of(means), self._compiled.of(sent), finite)
        for at in there_and_back(self._eager, turn):
            self.groups[at].finish(side, means[at], sent[at], turn, finite, self._spare)

    def write(self, side: Side, means: Sequence[Tensor]) -> None:
        """Write means, from the mean factors of one side."""
        if self._compiled is not None:
            self._compiled.write(side, self._compiled.of(means))
        for at in self._eager:
            self.groups[at].write(side, means[at], self._spare)

    def largest(self, side: Side, means: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the largest elements of the mean, in the bucket's own dtype, if that has a short range."""
        if not self.matrices:
            return []
        groups = zip(self.groups, means, strict=True)
        of_groups = (group.largest(side, mean, self._spare) for group, mean in groups)
        return self.matrices[0].tile.in_own_range(of_groups)


def planned(bucket: BucketView, compressor: object, make: Callable[[str | None], Plan]) -> Plan:
    """Return a bucket's plan for the level of compiled passes that is in use now, which may change between steps."""
    gradient = bucket.slots[0].gradient if bucket.slots else None
    level = None if gradient is None or runs_later(gradient) else level_for(gradient)
    return bucket.plan((compressor, level), lambda: make(level))


def product(P: Tensor, Q: Tensor, out: Tensor, spare: Tensor | None) -> Tensor:
    """Return P·Q of n×r and r×m, or batches: on a CPU p0·q0 + p1·q1 + ... from left to right, each operation rounded.

    Every processor, and every level of compiled passes, then gives the same bits. BLAS may add in any order, and fuse
    the multiplication with the addition, which some processors cannot. `spare` holds as many elements as `out`; on a
    GPU it is None.
    """
    if spare is None:
        return torch.matmul(P, Q, out=out)
    r, spare = P.shape[-1], spare[: out.numel()].view(out.shape)
    # `split` would take ten times as long to call.
    (column, row), *others = zip(P.chunk(r, dim=-1), Q.chunk(r, dim=-2), strict=True)
    torch.mul(column, row, out=out)
    for column, row in others:
        out.add_(torch.mul(column, row, out=spare))
    return out


def _is_small(tile: Tile) -> bool:
    return tile.layout.elements == tile.gradient.numel() <= SMALL_ELEMENTS


def _rows_of_right_factors(groups: Sequence[LowRankGroup]) -> Tensor | None:
    """Return the number of each element's row, for `keep_scaled`."""
    if not (groups and runs_later(groups[0].Q)):
        return None
    numbers, first = [], 0
    for group in groups:
        k, r, m = group.Q.shape
        rows = torch.arange(first, first + k * r, dtype=torch.int32, device=group.Q.device)
        numbers.append(rows.unsqueeze(1).expand(-1, m).reshape(-1))
        first += k * r
    return torch.cat(numbers)


def keep_scaled(kept: Sequence[Tensor], means: Sequence[Tensor], rows: Tensor, allowed: Tensor) -> None:
    """Keep each row of the means, scaled to a largest magnitude of 1, with the same few calls for any number of groups.

    Rows of zeros leave the old row in place, and so do rows where `allowed` is false: a 0-dim bool, or one for each of
    `kept`.
    """
    largest = torch.stack(torch._foreach_norm([row for mean in means for row in mean.flatten(0, 1).unbind()], math.inf))
    scale = largest.index_select(0, rows)
    before = torch.cat([basis.reshape(-1) for basis in kept])
    found = torch.cat([mean.reshape(-1) for mean in means]) / scale
    if allowed.dim():
        of_rows = [
            own for own, basis in zip(allowed.unbind(), kept, strict=True) for _ in range(math.prod(basis.shape[:-1]))
        ]
        allowed = torch.stack(of_rows).index_select(0, rows)
    bases = torch.where((scale > 0) & allowed, found, before).split([basis.numel() for basis in kept])
    torch._foreach_copy_(list(kept), [basis.view(own.shape) for basis, own in zip(bases, kept, strict=True)])


def there_and_back(items: Sequence[Item], turn: int) -> Sequence[Item]:
    """Return the items, reversed on every other turn, so that those used last, which are still cached, come first."""
    return items[::-1] if turn % 2 else items


def rows_of_a_block(m: int, r: int, threads: int) -> int:
    """Return the number of rows of a matrix of width m to process at a time, so that they stay in the cores' caches.

    Several threads share a block's rows or columns as their BLAS decides, and each needs enough of them. On one thread,
    products with one row or column stream through memory; those with more process a block a few columns at a time: if
    the block has few rows, a multiple of the BLAS's own number, each row is read as a stream. (All rows of a 768×3072
    matrix at once took 1.8 times as long at rank 4.)
    """
    most = max(1, threads * BLOCK_ELEMENTS // m)
    if r == 1 or threads > 1:
        return most
    return min(most, max(TILE_ROWS, BLOCK_ELEMENTS // 4 // m // TILE_ROWS * TILE_ROWS))
