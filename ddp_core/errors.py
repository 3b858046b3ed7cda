"""The errors that a training loop can run into, naming parameters and remedies.

Their opening phrases are the ones that PyTorch's users search for and its tests expect.
"""

from __future__ import annotations

from collections.abc import Sequence


class HookTimeoutError(RuntimeError, TimeoutError):
    """A communication hook's future was not completed in time."""


class NotAveragedError(RuntimeError):
    """An optimizer is about to take, or took, a step on gradients that were not averaged."""


class NotAveragedWarning(UserWarning):
    """The same, where it may be intended or is not certain."""


ON_PURPOSE = "If it is intended (local SGD), say so: ddp_core.steps_locally(optimizer)."


_USE_ALL = (
    "sure that all `forward` function outputs participate in calculating loss. For PyTorch's trace of every "
    "collective, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
)
_NOT_USED = (
    "Some parameters of the module were not used in producing the loss, or an exception cut the backward pass short. "
)
MAYBE_UNUSED = f"{_NOT_USED}Try passing the keyword argument `find_unused_parameters=True`, or make {_USE_ALL}"
NOT_FOUND = (
    f"{_NOT_USED}Since `find_unused_parameters=True` is enabled, return all outputs in lists, tuples, dicts or "
    f"dataclasses, where they are looked for, and make {_USE_ALL}"
)
CHANGED = (
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
    "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to True."
)


def unfinished(advice: str, missing: Sequence[int], names: Sequence[str], rank: int, waits: str) -> RuntimeError:
    """Return the error for a backward pass that left parameters without a gradient, so its reduction never ended."""
    return RuntimeError(
        f"Expected to have finished reduction in the prior iteration before starting a new one. {advice}\n"
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names[i] for i in missing)}\n"
        f"The reduction is in {waits}."
    )


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return some names in words."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def interrupted(failure: str) -> RuntimeError:
    """Return the error for a reduction cut short because a hook, or waiting for its result, raised."""
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one: it was interrupted by "
        f"{failure.rstrip('.')}. Gradients may differ between ranks; load a checkpoint and wrap again."
    )


def marked_twice(index: int, name: str) -> RuntimeError:
    """Return the error for a parameter whose gradient was reported a second time in one iteration."""
    return RuntimeError(
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} got a second "
        "gradient in one iteration. Usual causes: 1) it is used outside `forward`, or by several forward passes before "
        "one backward pass. 2) torch.utils.checkpoint(use_reentrant=True) runs over it more than once; take "
        "use_reentrant=False. If it is the same in every iteration, static_graph=True allows both."
    )


def static_graph_changed(index: int, name: str) -> RuntimeError:
    """Return the error for a parameter with more gradients than in the first iteration of a static graph."""
    return RuntimeError(
        "Your training graph has changed in this iteration, which static_graph=True promised not to happen: parameter "
        f"at index {index} with name {name} was used less often, or not at all, in the first iteration."
    )


def loss_in_parts(index: int, name: str) -> RuntimeError:
    """Return the error for a gradient from an output that the reduced backward pass had left out."""
    return RuntimeError(
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} got its gradient "
        "from an output that an earlier backward pass of the same iteration had left out, and whose parameters were "
        "then reduced as unused: this gradient would stay on this rank. With find_unused_parameters=True, and in the "
        "first iteration with static_graph=True, one backward pass must come through every output that is used: add "
        "the losses up."
    )


def unseen_outputs() -> RuntimeError:
    """Return the error for a first backward pass of a static graph that did not come through the module's outputs."""
    return RuntimeError(
        "static_graph=True: gradients came, but not through the outputs of the wrapped module, so they were not "
        "reduced. Return the tensors that the loss is computed from in lists, tuples, dicts or dataclasses."
    )


def broken_promise() -> RuntimeError:
    """Return the error for no_sync() around only the backward pass, which cannot work inside join()."""
    return RuntimeError(
        "no_sync() around the backward pass alone cannot work inside join(): ranks that have joined were told in the "
        "forward pass that gradients would be reduced. Put the forward pass inside no_sync() too."
    )


def converted(name: str) -> RuntimeError:
    """Return the error for a parameter whose graph node is no longer the one the reducer listens to."""
    return RuntimeError(
        f"parameter {name!r} was converted or moved after the module was wrapped, and its gradients would not be "
        "reduced: call .to(...), .half() and the like first, and wrap then"
    )


def unannounced_sparse(name: str) -> RuntimeError:
    """Return the error for a sparse gradient of a parameter whose bucket holds dense ones."""
    return RuntimeError(
        f"parameter {name!r} got a sparse gradient, which only nn.Embedding and nn.EmbeddingBag with sparse=True "
        "announce: use one of them, or make the gradient dense"
    )


def amid_reduction(what: str) -> RuntimeError:
    """Return the error for a call that is not possible during a backward pass."""
    return RuntimeError(
        f"{what} while gradients are being reduced; do it between the end of one backward pass and the start of the "
        "next"
    )


def late(name: str) -> str:
    """Return the warning about a gradient that came after its iteration's gradients were reduced."""
    return (
        f"parameter {name!r} got a gradient after this iteration's gradients were reduced: it stays on this rank. Run "
        "one forward pass per backward pass, or add the losses up. (Harmless if gradients of gradients were meant to "
        "stay local.)"
    )
