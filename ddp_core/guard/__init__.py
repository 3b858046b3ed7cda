"""The guard: no optimizer steps on gradients of a wrapped model that were not averaged, without a word.

Suspicion is cheap and local. Each wrapper has a log of the parameters whose gradient came outside a reduction,
or after one; the end of a reduction empties it, because a reduction averages all that ``p.grad`` holds. A step is
suspect if a parameter that it changes is in the log, if it runs in a backward pass whose means are not there yet, if no
reduction has ended since the optimizer's last step, or if a parameter of the model is not known to the reducer.

Proof costs only then: ranks compare fingerprints of the gradients through the store (``proof.py``). Equal ones are
averaged by hand, or come from the same data; others raise `NotAveragedError`, or warn.

The reducer of ddp_core says itself what it did. PyTorch's is followed from outside, with public hooks of PyTorch and
a few private names (``following.py``): parameters report their gradients, and the communication hook its buckets.
"""

from ddp_core.errors import NotAveragedError, NotAveragedWarning
from ddp_core.guard.alone import warn_of_one_rank
from ddp_core.guard.following import FOLLOWS_PYTORCH, guard_wrapper, hook_ran, notice_wrappers, release_wrapper
from ddp_core.guard.intent import GuardMode, check_mode, is_standing, local_on_purpose, set_guard, steps_locally
from ddp_core.guard.suspicion import Guard
from ddp_core.guard.wrappers import WrapperGuard

__all__ = [
    "FOLLOWS_PYTORCH",
    "Guard",
    "GuardMode",
    "NotAveragedError",
    "NotAveragedWarning",
    "WrapperGuard",
    "check_mode",
    "guard_wrapper",
    "hook_ran",
    "is_standing",
    "local_on_purpose",
    "notice_wrappers",
    "release_wrapper",
    "set_guard",
    "steps_locally",
    "warn_of_one_rank",
]
