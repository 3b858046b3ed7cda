"""The buckets that steps are made of: their views, kept between steps, and their parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from commhooks.errors import AttachError, GradientError, SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor
from commhooks.language.lending import Pool
from commhooks.language.requests import Layout
from commhooks.state.handover import hand_over
from commhooks.state.table import StateTable
from commhooks.wrappers.phases import Phase, phases_of

Key = tuple[int, ...]
"""A bucket is identified by the identities of its parameters."""


class Bucket(Protocol):
    """The interface of the buckets that both DDPs pass to a hook.

    An attribute and two methods more are optional. `weight` is this rank's weight in the mean, at least 0; None, on
    every rank, for equal weights. `output()` returns a tensor for the mean, with the shape and dtype of `buffer()`,
    which the compressor may then overwrite; by default the mean overwrites the gradients. `buffer()` may also be a
    matrix [world size, width], of any stride between rows, of which each rank gets the mean of one row: `chunks()` then
    returns the number of elements that a row has of each parameter. Row r holds elements r·chunk to (r + 1)·chunk of
    every parameter, one parameter after another, in the order that `StateTable.cut_along` describes; elements beyond a
    parameter's last one, and beyond the last parameter, are padding, such as zeros. `output()` is [width] then, by
    default this rank's row.
    """

    def index(self) -> int: ...  # noqa: D102
    def buffer(self) -> Tensor: ...  # noqa: D102
    def parameters(self) -> list[Tensor]: ...  # noqa: D102
    def is_last(self) -> bool: ...  # noqa: D102


class Buckets:
    """The buckets of the current step and of the last one; older ones are forgotten."""

    def __init__(self, table: StateTable, *, by_parameter: bool) -> None:
        self.are_one_models = False
        """True once the names of one model's parameters are known."""
        self.phase: Phase = Phase(0, is_guarded=False)
        """The compressor's phase in the current step."""
        self.pool: Pool = Pool()
        """The pool of memory from which all buckets' exchanges borrow."""
        self.layouts: dict[int, Layout] = {}
        """The layouts of buckets whose parameters are not asked for, by size."""
        self._in_use: Compressor | None = None
        self._phases: tuple[Phase, ...] = ()
        self._table = table
        self._by_parameter = by_parameter
        self._views: dict[Key, BucketView] = {}
        self._parameters: dict[Key, list[Tensor]] = {}  # kept alive, so that identities stay unique
        self._joined: dict[tuple[BucketView, ...], BucketView] = {}
        self._laid_out: weakref.WeakKeyDictionary[BucketView, Compressor] = weakref.WeakKeyDictionary()
        self._now: dict[Key, None] = {}
        self._before: dict[Key, None] = {}
        self._last_index = -1

    def view(self, bucket: Bucket, memory: Tensor) -> BucketView:
        """Return a bucket's view; reuse the last step's if parameters and memory are the same."""
        if not self._by_parameter:
            # Of any shape: an all-gather's is larger than the memory.
            view = BucketView(bucket.index(), memory, output=getattr(bucket, "output", lambda: None)())
            view.scratch.loans.pool = self.pool
            if not memory.is_sparse:  # counters identify layouts by identity: one for each size, whoever's bucket it is
                view.layout = self.layouts.setdefault(memory.numel(), view.layout)
            return view
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        self._now[key] = None
        known = self._views.get(key)
        if (
            known is not None
            and _is_same_memory(known.memory, memory)
            and (known.output is None or _is_same_memory(known.output, self._output(bucket, memory)))
        ):
            known.scratch.turn += 1
            return known
        self.learn_names(bucket, parameters)
        output = self._output(bucket, memory)
        slots = self._slots(bucket, memory, parameters, output)
        view = self._views[key] = BucketView(bucket.index(), memory, slots, output=output)
        view.scratch.loans.pool = self.pool
        self._parameters[key] = parameters
        if known is not None:
            view.layout, view.future = known.layout, known.future
        return view

    def joined(self, views: Sequence[BucketView]) -> BucketView:
        """Return the view of one bucket, or of several as one; it is kept as long as those are."""
        if len(views) == 1:
            return views[0]
        key = tuple(views)
        known = self._joined.get(key)
        if known is not None:
            known.scratch.turn += 1
            return known
        view = self._joined[key] = BucketView.of_several(key)
        view.scratch.loans.pool = self.pool
        for member in views:  # what the members needed by themselves
            member.plans.clear()
            self._laid_out.pop(member, None)
        return view

    def lay_out(self, view: BucketView, compressor: Compressor) -> bool:
        """Lay out a compressor's state for a bucket; return False if that was already done."""
        if self._laid_out.get(view) is compressor or not view.slots:
            return False
        view.plans.clear()  # made for another compressor, they may refer to memory that the table no longer uses
        self._table.lay_out(view, compressor)
        self._laid_out[view] = compressor
        return True

    def hand_over(self, compressor: Compressor, step: int) -> None:
        """Before a step, hand over unsent state if the compressor or its phase is a new one; see `hand_over`."""
        if self._in_use is not compressor:  # by identity: a user's settings may be arrays, which cannot be compared
            self._in_use, self._phases = compressor, phases_of(compressor)
        self.phase = next(phase for phase in reversed(self._phases) if phase.begin <= step)
        known, begin = self._table.in_phase or (None, 0)
        if known is not compressor or begin != self.phase.begin:
            hand_over(self._table, compressor, self.phase.begin, step)
            self._laid_out.clear()

    def learn_names(self, bucket: Bucket, parameters: list[Tensor]) -> None:
        """Learn parameters' names from a bucket that provides them, as ddp_core's do.

        Raises `AttachError` for unknown parameters once the names of one model's are known: no state of theirs would be
        saved or loaded.
        """
        if all(self._table.name_of(parameter) is not None for parameter in parameters):
            return
        if self.are_one_models:
            raise AttachError(
                f"bucket {bucket.index()} is one of other tensors than were named: {self._table.describe(parameters)}. "
                "State is kept by tensor, so its parameters() must be the very tensors of the feed's like(), which "
                "must return the same ones at each call."
            )
        names: Callable[[], list[str]] | None = getattr(bucket, "names", None)
        if names is not None:
            self._table.bind(zip(names(), parameters, strict=True))

    @property
    def is_step_under_way(self) -> bool:
        """True if the step has begun and its last bucket has not come yet."""
        return self._last_index >= 0

    def follow(self, bucket: Bucket) -> None:
        """Add a bucket to the current step."""
        self._last_index = bucket.index()

    def cannot_contain(self, bucket: Bucket) -> bool:
        """Return whether a bucket cannot belong to the current step, so that the next one begins.

        The index alone is not enough: in a static graph's first iteration PyTorch's DDP numbers every bucket 0, and
        marks none as the last one.
        """
        if not self._by_parameter or self._last_index < 0:
            return False
        if bucket.index() != self._last_index:
            return bucket.index() < self._last_index
        return not set(map(id, bucket.parameters())).isdisjoint(itertools.chain(*self._now))

    def are_of_another_model(self, bucket: Bucket) -> bool:
        """Return whether a bucket begins a step and none of its parameters was seen or named before."""
        begins = not self.is_step_under_way or self.cannot_contain(bucket)
        return begins and self._table.knows_none_of(bucket.parameters())

    def end_step(self, step: int) -> None:
        """End the current step; raise `SettingsError` if two models take turns."""
        self._last_index = -1
        self._refuse_a_second_model(step)
        for key in self._parameters.keys() - self._now.keys():
            del self._parameters[key]
            self._views.pop(key, None)
        if self._joined:
            kept = set(self._views.values())
            self._joined = {views: view for views, view in self._joined.items() if kept.issuperset(views)}
        self._before, self._now = self._now, {}

    def forget_last_step(self) -> None:
        """Forget which parameters were in the last step's buckets."""
        self._before = {}

    def names(self) -> list[list[str]]:
        """Return the parameter names in the last step's buckets, in order."""
        return [
            [self._table.of(parameter).key for parameter in self._parameters[key]]
            for key in self._before
            if key in self._parameters
        ]

    def views(self) -> list[BucketView]:
        """Return the views that are kept."""
        return [*self._views.values(), *self._joined.values()]

    def _output(self, bucket: Bucket, memory: Tensor) -> Tensor | None:
        given: Callable[[], Tensor] | None = getattr(bucket, "output", None)
        if given is None:
            return memory[self._table.rank] if memory.dim() == 2 and not memory.is_sparse else None
        output, shape = given(), memory.shape[-1:]
        if output.shape != shape or output.dtype != memory.dtype or output.device != memory.device:
            raise GradientError(
                f"bucket {bucket.index()}: the output must be of shape {tuple(shape)}, {memory.dtype}, on "
                f"{memory.device} (got {tuple(output.shape)}, {output.dtype}, {output.device})."
            )
        return output

    def _slots(self, bucket: Bucket, memory: Tensor, parameters: list[Tensor], output: Tensor | None) -> list[Slot]:
        if memory.dim() == 2 and output is not None:
            return self._sharded_slots(bucket, memory, parameters, output)
        # PyTorch's DDP passes complex gradients as pairs of real numbers.
        as_pairs = not memory.is_complex()
        sizes = [parameter.numel() * (2 if as_pairs and parameter.is_complex() else 1) for parameter in parameters]
        if sum(sizes) != memory.numel():
            raise GradientError(
                f"a bucket of {memory.numel()} elements was passed for parameters of {sum(sizes)} elements "
                f"({self._table.describe(parameters)})."
            )
        parts = [memory] if memory.is_sparse else memory.detach().split(sizes)
        # To a compressor such a parameter is the vector of those real numbers, which are the gradient's elements.
        pairs = zip(parameters, parts, strict=True)
        means: Sequence[Tensor | None] = [None] * len(parameters) if output is None else output.split(sizes)
        return [
            Slot(part if as_pairs and p.is_complex() else p, part, self._table.of(p), mean)
            for (p, part), mean in zip(pairs, means, strict=True)
        ]

    def _sharded_slots(self, bucket: Bucket, memory: Tensor, parameters: list[Tensor], output: Tensor) -> list[Slot]:
        """Return the slots of a bucket of shards; see `Bucket`."""
        chunks: list[int] = cast(Any, bucket).chunks()
        rank, ranks = self._table.rank, self._table.world_size
        fits = len(memory) == ranks and len(chunks) == len(parameters) and sum(chunks) <= memory.shape[1]
        if not fits or any(p.numel() > chunk * ranks for p, chunk in zip(parameters, chunks, strict=False)):
            raise GradientError(
                f"bucket {bucket.index()}: a matrix of shape {tuple(memory.shape)}, in chunks of {chunks} elements, "
                f"cannot hold {ranks} shards of {self._table.describe(parameters)}."
            )
        slots, first = [], 0
        for parameter, chunk in zip(parameters, chunks, strict=True):
            own = min(max(parameter.numel() - rank * chunk, 0), chunk)
            gradient, mean = memory.detach()[:, first : first + chunk], output[first : first + own]
            slots.append(Slot(parameter, gradient, self._table.of(parameter), mean))
            first += chunk
        return slots

    def _refuse_a_second_model(self, step: int) -> None:
        """Raise `SettingsError` if this step has no parameter in common with the last one.

        It is not raised once the names of one model's parameters are known: those belong together.
        """
        if self._now and self._before and self._now.keys().isdisjoint(self._before):
            now, before = (set(itertools.chain(*keys)) for keys in (self._now, self._before))
            if now.isdisjoint(before) and not self.are_one_models:
                raise SettingsError(
                    f"step {step} brought gradients of a model that has no parameter in common with that of step "
                    f"{step - 1}; make one state for each model, or bind the model whose parameters take turns."
                )


def _is_same_memory(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.is_sparse or other.is_sparse:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
