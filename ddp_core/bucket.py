"""The memory in which gradients are sent, and the view of it that a communication hook receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

# A gradient at least this long is copied as soon as it is ready, while it is in cache; shorter ones wait until their
# bucket is full and are copied together, since for them a call costs more than it saves (measured on fp32, one core).
EAGER_ELEMENTS = 131072


class GradBucket:
    """A bucket as a hook sees it: PyTorch's ``dist.GradBucket``, plus the parameters' names.

    The buffer holds this rank's gradients, not divided by the world size. A hook may write into it.
    """

    def __init__(self, index: int, is_last: bool, buffer: Tensor, members: Sequence[Parameter], names: Sequence[str]):
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._members = members
        self._names = names

    def index(self) -> int:
        """Return the bucket's position in the order of launch, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket launched in an iteration."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return the bucket's memory: 1-D, with gradients one after another (or the one sparse gradient)."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor that ``buffer`` and ``gradients`` return."""
        self._buffer = buffer

    def parameters(self) -> list[Parameter]:
        """Return the model's own parameter objects, in the order of the bucket's memory."""
        return list(self._members)

    def names(self) -> list[str]:
        """Return the parameters' names in the wrapped module, in the same order; PyTorch's bucket has no names."""
        return list(self._names)

    def gradients(self) -> list[Tensor]:
        """Return one view of the buffer per parameter, with the parameter's own shape and strides."""
        return [self._buffer] if self._buffer.is_sparse else views_of(self._buffer, self._members)


def is_dense(tensor: Tensor) -> bool:
    """Return True if ``tensor`` covers one contiguous range of memory, each element once, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def views_of(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """Split a 1-D tensor into views with the shapes and, where possible, the strides of ``members``."""
    views, offset = [], flat.storage_offset()
    for member in members:
        strides = (
            member.stride()
            if is_dense(member)
            else torch.empty(member.shape, dtype=member.dtype, device="meta").stride()
        )
        views.append(flat.as_strided(member.shape, strides, offset))
        offset += member.numel()
    return views


class Bucket:
    """Some parameters' gradients in one flat tensor, and the number of gradients still to come.

    ``indices`` are positions in the model; a position within the bucket is called a *place*.
    """

    def __init__(
        self,
        index: int,
        indices: Sequence[int],
        members: Sequence[Parameter],
        names: Sequence[str],
        lazy: bool = False,
    ):
        self.index = index
        self.indices = indices
        self.members = members
        self.names = names
        self.eager = [member.numel() >= EAGER_ELEMENTS for member in members]
        self.batched = [place for place, eager in enumerate(self.eager) if not eager]
        self.lazy = lazy
        self.flat, self.views = members[0].new_empty(0), list[Tensor]()
        if not lazy:
            self.allocate()
        self.reset()

    def allocate(self) -> None:
        """Set memory aside for the gradients."""
        self.flat = self.members[0].new_empty(self._elements)  # no page is in use before the first gradients are
        self.views = views_of(self.flat, self.members)
        self._addresses = [view.data_ptr() for view in self.views]

    def release(self) -> None:
        """Let go of the memory; gradients that are views of it keep it."""
        self.flat, self.views = self.members[0].new_empty(0), []

    @property
    def nbytes(self) -> int:
        """The size of its gradients."""
        return self._elements * self.members[0].element_size()

    def zeros(self) -> Tensor:
        """Return zeros in new memory, for a rank without any gradient to send."""
        return self.members[0].new_zeros(self._elements)

    @property
    def _elements(self) -> int:
        return sum(member.numel() for member in self.members)

    def reset(self) -> None:
        """Expect every gradient again."""
        self.pending = len(self.members)
        self.absent: list[int] = []  # places without a gradient this time: zeros are sent instead

    def gather(self, places: Sequence[int], divisor: int | None, as_views: bool) -> None:
        """Move the gradients at ``places`` into the bucket, divided by ``divisor`` if one is given.

        With ``as_views``, ``p.grad`` *is* the bucket's memory afterwards. For bit equality with PyTorch's reducer, a
        gradient from elsewhere is multiplied by the reciprocal, while one already in place is divided.
        """
        members, views = self.members, self.views  # a thousand short gradients: look-ups count
        copied, grads, aliased = [], [], []
        for place in places:
            grad = members[place].grad
            if grad is None:
                views[place].zero_()
                self.absent.append(place)
            elif as_views and grad.data_ptr() == self._addresses[place]:
                aliased.append(place)
            else:
                copied.append(place)
                grads.append(grad)
        if copied:
            self._copy([views[place] for place in copied], grads, divisor)
        if aliased and divisor is not None:
            self._scale([views[place] for place in aliased], Tensor.div_, divisor)
        if as_views:
            for place in copied:
                members[place].grad = views[place]

    @torch.no_grad()
    def adopt(self) -> None:
        """Move existing gradients into this memory, unscaled, and make ``p.grad`` its views."""
        for member, view in zip(self.members, self.views, strict=True):
            if member.grad is not None and not member.grad.is_sparse:
                member.grad = view.copy_(member.grad)

    def _copy(self, views: list[Tensor], grads: list[Tensor], divisor: int | None) -> None:
        if divisor is not None and len(views) == 1:  # one pass over the memory instead of two
            torch.mul(grads[0], 1.0 / divisor, out=views[0])
            return
        torch._foreach_copy_(views, grads)
        if divisor is not None:
            self._scale(views, Tensor.mul_, 1.0 / divisor)

    def _scale(self, views: list[Tensor], operation: Callable[[Tensor, float], Tensor], factor: float) -> None:
        # not torch._foreach_mul_: on the CPU it rounds the factor to the tensors' dtype (1/3 in bf16 is 0.2 % off)
        for tensor in [self.flat] if len(views) == len(self.members) else views:
            operation(tensor, factor)

    def scatter(self, mean: Tensor, untouched: set[int], as_views: bool) -> None:
        """Set the ``p.grad`` of every parameter, except the ``untouched`` (by model index), to its part of ``mean``.

        ``mean`` is 1-D, of the bucket's size; it may be the bucket's own memory.
        """
        inside = mean.data_ptr() == self.flat.data_ptr() and mean.dtype == self.flat.dtype
        if as_views and not inside:
            self.flat.copy_(mean)
        for place in self.absent:
            member, view = self.members[place], self.views[place]
            if self.indices[place] not in untouched and member.grad is None:
                member.grad = view if as_views else torch.empty_like(view)
        kept = [place for place, index in enumerate(self.indices) if index not in untouched]
        if kept and not as_views:
            views = self.views if inside else views_of(mean, self.members)
            grads = cast(list[Tensor], [self.members[place].grad for place in kept])
            torch._foreach_copy_(grads, [views[place] for place in kept])


class SparseBucket(Bucket):
    """A parameter whose gradient is sparse: the gradient itself is sent, so no memory is set aside."""

    lazy = False

    def __init__(self, index: int, indices: Sequence[int], members: Sequence[Parameter], names: Sequence[str]):
        self.index, self.indices, self.members, self.names = index, indices, members, names
        self.eager, self.batched = [True], []
        self.flat = self.zeros()
        self.views = [self.flat]
        self.reset()

    def zeros(self) -> Tensor:
        """Return a gradient without rows, in an embedding's form, for a rank without any gradient to send."""
        member = self.members[0].detach()
        rows = torch.empty(1, 0, dtype=torch.long, device=member.device)
        return torch.sparse_coo_tensor(
            rows, member.new_empty(0, *member.shape[1:]), member.shape, check_invariants=False
        )

    def gather(self, places: Sequence[int], divisor: int | None, as_views: bool) -> None:
        """Prepare a copy of the gradient to be sent, divided by ``divisor`` if one is given.

        Autograd lets a sparse gradient share its values with other gradients, so nothing is written into it.
        """
        if not places:
            return
        grad = self.members[0].grad
        if grad is not None and not grad.is_sparse:
            raise RuntimeError(
                f"parameter {self.names[0]!r}: expected a sparse gradient, as its module has sparse=True, "
                f"but got one with layout {grad.layout}"
            )
        if grad is None:
            self.absent.append(0)
            self.flat = self.zeros()
        else:
            self.flat = grad.clone() if divisor is None else grad / divisor

    def scatter(self, mean: Tensor, untouched: set[int], as_views: bool) -> None:
        """Make ``mean`` (of the parameter's shape) the gradient, unless the parameter is ``untouched``."""
        if self.indices[0] not in untouched:
            self.members[0].grad = mean
