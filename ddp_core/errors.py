"""The errors a training loop can run into, in words that name parameters and remedies.

The opening phrases are those that PyTorch's users search for and its tests expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_core.reducer import ReducerSettings


def unfinished(
    missing: Sequence[int], names: Sequence[str], rank: int, settings: ReducerSettings, static_graph: bool
) -> RuntimeError:
    """Say that the previous backward pass left parameters without a gradient, so its reduction never ended."""
    text = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if static_graph:
        text += (
            "This error indicates that your training graph has changed in this iteration, "
            "e.g., one parameter is used in first iteration, but then got unused in the second iteration. "
            "this is not compatible with static_graph set to True.\n"
        )
    else:
        text += _unused_hints(settings.find_unused_parameters)
    return RuntimeError(
        f"{text}Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names[i] for i in missing)}"
    )


def _unused_hints(searching: bool) -> str:
    text = "This error indicates that your module has parameters that were not used in producing loss. "
    if searching:
        text += "Since `find_unused_parameters=True` is enabled, this is likely to be cured by "
    else:
        text += (
            "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to DistributedDataParallel, and by \n"
        )
    return text + (
        "making sure all `forward` function outputs participate in calculating loss. \n"
        "If that is so already, the search did not find the output tensors in what `forward` returned: "
        "return them in lists, tuples, dicts or dataclasses. To see PyTorch's own trace of every collective, "
        "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.\n"
    )


def marked_twice(index: int, name: str) -> RuntimeError:
    """Say that one parameter's gradient was reported a second time in one iteration."""
    return RuntimeError(
        "Expected to mark a variable ready only once. Two gradients were accumulated in one iteration into the "
        f"parameter at index {index} with name {name}. Usual causes: 1) the parameter is used outside `forward`, or "
        "by several forward passes before one backward pass; wrap only one of them, or set static_graph=True if this "
        "is the same in every iteration. 2) several reentrant backward passes, e.g. "
        "torch.utils.checkpoint(use_reentrant=True) over a module that holds it twice; use use_reentrant=False, or "
        "static_graph=True."
    )


def static_graph_changed(index: int, name: str) -> RuntimeError:
    """Say that a parameter fired more often than in the first iteration of a static graph."""
    return RuntimeError(
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
        f"then got used in the second iteration. this is not compatible with static_graph set to True. (parameter "
        f"{index}, {name!r})"
    )
