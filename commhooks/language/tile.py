"""Tiles: ranges of a bucket's memory to compute with.

A tile combines gradient and residual. `form` returns their sum, `keep` takes the unsent part, and `write` takes the
mean. The compressor need not know whether there is a residual, or its dtype and location.

Finish with a tile before forming the next one, in the order form, keep, room, write; with COMMHOOKS_CHECK_TILES=1 in
the environment, as in this project's tests, keeping or writing out of order raises `CompressorError`. If gradients are
fp32 or wider, `form` and `room` are the bucket's own memory. If they are narrower, all tiles share one scratch buffer,
so forming another tile overwrites it: copy the tensor to be sent, and call `form` again after a `yield`. A stack of
tiles always uses that buffer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from commhooks.devices import place_of
from commhooks.errors import CompressorError
from commhooks.language import lending
from commhooks.language.memory import add_residuals, commit, commit_all, surely
from commhooks.language.requests import Layout, Part
from commhooks.tensors import computing_dtype


class Form(Protocol):
    """A view of a range of memory as rows: those of a matrix, or matrices of a stack."""

    @property
    def elements(self) -> int:
        """The number of elements of all rows."""
        ...

    def view(self, memory: Tensor) -> Tensor:
        """View 1-D memory as the rows, without copying."""
        ...


class Scratch:
    """The shared part of a bucket's tiles: memory of the computing dtype, a step counter, and the mean if it is sparse.

    Tiles hold this rather than the bucket, which would otherwise refer to itself through them: its memory would then be
    freed only by the cyclic garbage collector, which some training loops turn off.
    """

    def __init__(self, memory: Tensor) -> None:
        self.turn = 0
        """A counter of steps: a sum formed in an earlier step is no longer valid."""
        self.sparse_mean: Tensor | None = None
        self.loans: lending.Loans = lending.Loans()
        """The memory that the bucket's exchange has borrowed."""
        self.taken: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        """State that has been overwritten before the verdict, and its old values elsewhere; see `settle`."""
        self.used: Mapping[int, Tensor] = {}
        """On a GPU, if parameters may be unused on every rank: for each storage of state, whether its parameter was
        used."""
        self._device = memory.device
        self._dtype = computing_dtype(memory.dtype)
        self.is_needed: bool = memory.dtype != self._dtype and not memory.is_sparse
        self._memory: Tensor | None = None
        self._user = 0  # an identity: a reference would make a cycle

    def permits(self, kept: Tensor, finite: Tensor) -> Tensor:
        """Return a mask of a parameter's state that may be written: `finite`, if some rank used the parameter."""
        return finite & self.used[place_of(kept)] if self.used else finite

    def permits_each(self, kept: Sequence[Tensor], finite: Tensor) -> Tensor:
        """Return `finite` or, if parameters may be unused, one bool for each memory; see `permits`."""
        return finite & torch.stack([self.used[place_of(each)] for each in kept]) if self.used else finite

    def settle(self, finite: bool) -> None:
        """Put the old values of overwritten state back unless `finite`; they are not needed from now on."""
        taken, self.taken = self.taken, []
        if not finite:
            for state, before in taken:
                torch._foreach_copy_(list(state), list(before))

    def lend(self, user: object) -> None:
        """Record the user of the memory from now on, so that `check` can detect that another's contents are gone."""
        self._user = id(user)

    def check(self, user: object, tensor: Tensor, what: str) -> None:
        """Raise `CompressorError` if a tensor lies in memory that another tile has used since."""
        is_here = self._memory is not None and _share_memory(tensor, self._memory)
        if is_here and self._user != id(user):
            raise CompressorError(f"what is {what} lies in memory that another tile has used since; see Tile.")

    def room(self, shape: torch.Size) -> Tensor:
        """Return memory of a shape; its contents last until the next call."""
        if self._memory is None or self._memory.numel() < shape.numel():
            self._memory = torch.empty(shape.numel(), dtype=self._dtype, device=self._device)
        return self._memory[: shape.numel()].view(shape)


class Tile:
    """A range of a bucket's gradients, together with its residual."""

    def __init__(
        self,
        scratch: Scratch,
        gradient: Tensor,
        layout: Layout,
        residuals: Sequence[tuple[int, Tensor]],
        decay: float,
        mean: Tensor | None = None,
    ) -> None:
        self.gradient = gradient
        """A view of the bucket's memory, of any shape; or one parameter's sparse gradient."""
        self.mean: Tensor = gradient if mean is None else mean
        """Memory of the same shape for the mean: a view of the bucket's output, by default `gradient`."""
        self.layout = layout
        self._scratch = scratch
        self._residuals = residuals
        """Each residual's offset in the tile, and its memory: 1-D, or of the gradient's shape if it is the only one."""
        self._whole = residuals[0][1] if len(residuals) == 1 and residuals[0][1].shape == gradient.shape else None
        """The residual, if there is exactly one and it covers the tile."""
        self._decay = decay
        self._formed_in = self._written_in = self._taken_in = -1

    @property
    def keeps(self) -> bool:
        """True if `keep` keeps anything; otherwise the unsent part is lost and need not be computed."""
        return bool(self._residuals)

    def in_own_range(self, means: Iterable[Tensor]) -> list[Tensor]:
        """Return each mean's largest magnitude, in the bucket's dtype, for a verdict on means that are finite in fp32.

        Only fp16 has a shorter range, in which such a mean may be inf; for other dtypes the list is empty, and means
        that come from a generator are not computed. Leave out means without elements: they have no largest magnitude.
        """
        if torch.finfo(self.gradient.dtype).max >= torch.finfo(torch.bfloat16).max:
            return []
        return [mean.abs().amax().to(self.gradient.dtype) for mean in means]

    @property
    def room(self) -> Tensor:
        """Memory of the tile's shape and the computing dtype: the bucket's own, if that is wide enough.

        Otherwise all tiles of a bucket share one scratch buffer.
        """
        if lending.IS_CHECKED:
            self._scratch.lend(self)
        return self._scratch.room(self.gradient.shape) if self._scratch.is_needed else self.gradient

    def form(self) -> Tensor:
        """Return gradient + residual in `room`; may be called repeatedly in a step until `write` is called.

        The result may be overwritten; a bucket of fp32 or wider has no other copy.
        """
        room, scratch = self.room, self._scratch
        if lending.IS_CHECKED:
            self._check_unwritten()
        if scratch.is_needed:
            room.copy_(self.gradient)
        elif self._formed_in == scratch.turn:
            if self.is_taken:
                raise CompressorError("a gradient was formed after its residual had been taken; see Tile.took.")
            return room
        self._formed_in = scratch.turn
        if self._whole is not None:
            add_residuals([room], [self._whole], self._decay)
        elif self._residuals:
            add_residuals(self._places(room), [kept for _, kept in self._residuals], self._decay)
        return room

    @property
    def memory(self) -> tuple[Tensor, Tensor | None, Tensor] | None:
        """Gradient, residual and mean, for passes that compute in them without `form`, `keep` and `write`.

        None if they do not all lie row by row, in the computing dtype and on one device, with one residual or none.
        Such passes call `to_form` before they form tiles.
        """
        own = self.gradient, self._whole, self.mean
        is_plain = not self._scratch.is_needed and (self._whole is not None or not self._residuals)
        here = [tensor for tensor in own if tensor is not None]
        alike = all(one.dtype == here[0].dtype and one.device == here[0].device for one in here)
        return own if is_plain and alike and all(one.is_contiguous() for one in here) else None

    @property
    def decay(self) -> float:
        """The factor of the residual in `form`."""
        return self._decay

    def part(self, tensor: Tensor | None = None, wire: torch.dtype | None = None) -> Part:
        """Return a part of a request: the tile itself, to be averaged in place, or a tensor that represents it."""
        if tensor is None:
            return Part(self.gradient, self.layout, wire, in_place=True, borrow=self._borrow)
        in_place = tensor.data_ptr() == self.room.data_ptr()
        return Part(tensor, self.layout, wire, in_place=in_place, borrow=self._borrow)

    def _borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._scratch.loans.borrow(torch.Size(shape), dtype, self.gradient.device)

    def residual_room(self, finite: Tensor) -> Tensor:
        """Return memory to compute the unsent part in: the residual's own if it may be overwritten now.

        Pass the result to `keep` afterwards.
        """
        room, whole = self.room, self._whole
        if whole is not None and whole.dtype == room.dtype and whole.device == room.device and surely(finite):
            return whole
        return room

    @functools.cached_property
    def _can_be_taken(self) -> bool:
        own, elements = self.gradient, sum(kept.numel() for _, kept in self._residuals)
        return (
            self.keeps
            and self._decay == 1
            and elements == own.numel()
            and all(
                type(one) is Tensor and one.is_cpu and one.dtype is torch.float32 and one.is_contiguous()
                for one in (own, *(kept for _, kept in self._residuals))
            )
        )

    @property
    def is_taken(self) -> bool:
        """True if the residual was taken in this step."""
        return self._taken_in == self._scratch.turn

    def residuals_to_take(self) -> Sequence[Tensor]:
        """Return the residual for one pass in place of `form` and `keep`; nothing if these must be used.

        It is returned in parts that cover the tile in order, contiguous, in fp32, on a CPU. The pass adds them to
        `gradient`, overwrites them with the unsent part before the verdict, and leaves their old values in `gradient`.
        Call `took` after it, and `BucketView.settle` with the verdict before writing the mean. If the step fails before
        that, the old values are put back too.
        """
        if self._formed_in == self._scratch.turn or not self._can_be_taken:
            return ()
        return [kept for _, kept in self._residuals]

    def took(self) -> None:
        """Record that the residual was overwritten, and that `gradient` holds its old values."""
        self._formed_in = self._taken_in = self._scratch.turn
        before = [self.gradient] if self._whole is not None else self._places(self.gradient)
        self._scratch.taken.append(([kept for _, kept in self._residuals], before))

    def keep(self, unsent: Tensor, finite: Tensor) -> None:
        """Keep the unsent part, of the tile's shape, for the next step; if `finite` is false, change nothing."""
        if self.is_taken:
            raise CompressorError("an unsent part was kept after the residual had been taken; see Tile.took.")
        if unsent.shape != self.gradient.shape:
            raise CompressorError(
                f"what was not sent, of shape {tuple(unsent.shape)}, was kept for gradients of shape "
                f"{tuple(self.gradient.shape)}."
            )
        if lending.IS_CHECKED:
            self._scratch.check(self, unsent, "kept")
            is_over = self._written_in == self._scratch.turn and _share_memory(unsent, self.mean)
            if is_over and self.keeps:
                raise CompressorError("what is kept was overwritten by the mean before; see Tile.")
        if self._whole is not None:
            commit(self._whole, unsent, self._scratch.permits(self._whole, finite))
            return
        for (_, kept), piece in zip(self._residuals, self._places(unsent), strict=True):
            commit(kept, piece, self._scratch.permits(kept, finite))

    def write(self, mean: Tensor) -> None:
        """Write the mean, by default over the gradient; this overwrites whatever was formed there."""
        if lending.IS_CHECKED:
            self._scratch.check(self, mean, "written")
            self._written_in = self._scratch.turn
        if mean is self.mean:
            return
        if mean.shape != self.gradient.shape:
            raise CompressorError(
                f"a mean of shape {tuple(mean.shape)} was written for gradients of shape {tuple(self.gradient.shape)}."
            )
        if self.gradient.is_sparse:
            self._scratch.sparse_mean = mean
        else:
            self.mean.copy_(mean)

    def rows(self, form: Form, rows: int) -> list[Tile]:
        """Return the tile, viewed by `form`, in tiles of `rows` of its rows, without elements beyond them.

        In one step, form either these tiles or the whole, not both.
        """
        inside = form.elements
        blocks = form.view(self.gradient.view(-1)[:inside]).split(rows)
        is_apart = self.mean is not self.gradient
        means = form.view(self.mean.view(-1)[:inside]).split(rows) if is_apart else blocks
        if self._whole is not None:
            kept = form.view(self._whole.view(-1)[:inside]).split(rows)
            residuals: list[Sequence[tuple[int, Tensor]]] = [[(0, block)] for block in kept]
        else:  # no residual, or those of several parameters in one matrix: its rows are contiguous
            ends = itertools.accumulate(block.numel() for block in blocks)
            residuals = [self._overlap(end - block.numel(), end) for end, block in zip(ends, blocks, strict=True)]
        places = zip(blocks, residuals, means, strict=True)
        return [Tile(self._scratch, block, self.layout, own, self._decay, mean) for block, own, mean in places]

    def rest(self, start: int) -> list[Tile]:
        """Return the elements from `start` on, if any, as a list of one tile with the layout of the whole."""
        end = self.gradient.numel()
        if start == end:
            return []
        own = self._overlap(start, end)
        gradient = self.gradient.view(-1)[start:]
        mean = gradient if self.mean is self.gradient else self.mean.view(-1)[start:]
        return [Tile(self._scratch, gradient, self.layout, own, self._decay, mean)]

    def _check_unwritten(self) -> None:
        if self._written_in == self._scratch.turn and self.mean is self.gradient:
            raise CompressorError("a gradient was formed again after its mean had taken its place; see Tile.")

    def _overlap(self, start: int, end: int) -> list[tuple[int, Tensor]]:
        """Return the parts of the residuals that lie within a range of this tile."""
        found = []
        for first, kept in self._residuals:
            low, high = max(start, first), min(end, first + kept.numel())
            if low < high:
                found.append((low - start, kept[low - first : high - first]))
        return found

    def _places(self, memory: Tensor) -> list[Tensor]:
        """Return the views of memory of the tile's shape that correspond to its residuals."""
        flat = memory.view(-1)
        return [flat[first : first + kept.numel()] for first, kept in self._residuals]


def form_together(tiles: Sequence[Tile]) -> None:
    """Form tiles of one bucket in as few calls as possible, except those that share the scratch buffer."""
    memories, residuals = [], []
    for tile in tiles:
        if not tile._scratch.is_needed and tile._formed_in != tile._scratch.turn:
            tile._formed_in = tile._scratch.turn
            memories += [tile.gradient] if tile._whole is not None else tile._places(tile.gradient)
            residuals += [kept for _, kept in tile._residuals]
    if memories:
        add_residuals(memories, residuals, tiles[0]._decay)


def to_form(tiles: Sequence[Tile]) -> bool:
    """Return whether the caller has to form these tiles of one bucket, which count as formed from now on."""
    turn = tiles[0]._scratch.turn
    is_due = tiles[0]._formed_in != turn
    for tile in tiles:
        if lending.IS_CHECKED:
            tile._check_unwritten()
        assert (tile._formed_in != turn) == is_due, "tiles are formed together"
        tile._formed_in = turn
    return is_due


class TileStack:
    """Tiles of one shape, side by side: a call costs more than the arithmetic of a small tile, so all share one.

    Use it like a tile whose tensors have one more dimension, the first. `form` and `room` are the scratch buffer, or
    with `apart` memory of its own, in which the tiles are formed once a step.
    """

    def __init__(self, tiles: Sequence[Tile], *, apart: bool = False) -> None:
        self._tiles = tiles
        self._scratch = tiles[0]._scratch
        self._gradients = [tile.gradient for tile in tiles]
        self._means = [tile.mean for tile in tiles]
        self._shape = torch.Size((len(tiles), *tiles[0].gradient.shape))
        self._residuals = [tile._whole for tile in tiles if tile._whole is not None]
        own = tiles[0].gradient
        self._own = own.new_empty(self._shape, dtype=computing_dtype(own.dtype)) if apart else None
        self._formed_in = -1

    @staticmethod
    def takes(tile: Tile) -> bool:
        """Return whether a tile can be stacked with others of its shape: it has one residual on its device, or none."""
        whole = tile._whole
        return not tile.keeps if whole is None else whole.device == tile.gradient.device

    @property
    def keeps(self) -> bool:
        """True if `keep` keeps anything; either all tiles have a residual, or none has."""
        return bool(self._residuals)

    @property
    def room(self) -> Tensor:
        """Memory for all tiles, in the computing dtype, which all tiles of a bucket share unless it is `apart`."""
        if self._own is not None:
            self._formed_in = -1
            return self._own
        if lending.IS_CHECKED:
            self._scratch.lend(self)
        return self._scratch.room(self._shape)

    def form(self) -> Tensor:
        """Return gradient + residual of every tile in `room`."""
        if self._own is not None and self._formed_in == self._scratch.turn:
            return self._own
        room, is_formed = self.room, False
        if self._own is not None:
            form_together(self._tiles)
            self._formed_in, is_formed = self._scratch.turn, not self._scratch.is_needed
        if self._scratch.is_needed:
            room.copy_(torch.stack(self._gradients))
        else:
            torch.stack(self._gradients, out=room)
        if self._residuals and not is_formed:
            add_residuals([room], [torch.stack(self._residuals)], self._tiles[0]._decay)
        return room

    def residual_room(self, finite: Tensor) -> Tensor:
        """Return memory to compute the unsent part in: `room`, since residuals lie apart."""
        return self.room

    def keep(self, unsent: Tensor, finite: Tensor) -> None:
        """Keep the unsent part for the next step; if `finite` is false, change nothing."""
        if lending.IS_CHECKED:
            self._scratch.check(self, unsent, "kept")
        commit_all(self._residuals, unsent, self._scratch.permits_each(self._residuals, finite))

    def write(self, means: Tensor) -> None:
        """Write the means; see `Tile.write`."""
        if lending.IS_CHECKED:
            self._scratch.check(self, means, "written")
        torch._foreach_copy_(self._means, list(means.unbind()))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.is_sparse or other.is_sparse:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0  # fake tensors have no memory
