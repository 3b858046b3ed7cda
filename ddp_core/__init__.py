"""A bucketed DistributedDataParallel in readable Python, with PyTorch's interface and bit-identical results.

Reading order:

1. ``buckets.py``: which gradients are reduced together, and the memory in which they are sent.
2. ``reducer.py``: when a bucket is launched, and how its mean gets into ``p.grad``. These two files are the kernel.
3. ``lifecycle.py``: the phases of an iteration, its state, and how an error ends it. ``hooks.py``: what a hook receives
   and may return. ``listening.py`` and ``graph.py``: how autograd reports gradients and the end of a backward pass.
4. ``feature.py``: the moments at which the kernel calls whatever it does not do itself; then any file of ``features``.
5. ``distributed.py``: the class that programs use. It makes a reducer and adds the features that its arguments need.

One iteration; on the right, the methods of `Feature` that are called in it::

    forward     Reducer.before_forward            the previous reduction is over
                Reducer.leave_iteration                once: rebuild the buckets
                the wrapped module runs
                Reducer.after_forward             expect every gradient           after_forward

    backward    autograd adds a gradient to p.grad, last layers first
                Reducer.gradient_ready            count down                      on_gradient; on_begin (the first)
                Reducer.arrive                    copy it into its bucket
                                                  (short ones: when it is complete)
                                                    ┌─────┬──────────┬──────────┐
                                                    │  0  │    1     │    2     │
                                                    └─────┴──────────┴──────────┘
                Reducer.launch_complete_buckets   0, then 1, then 2               leaves_out; on_all_launched
                Reducer.launch                    hook(state, bucket) -> future
                autograd continues with earlier layers, and calls at its end:

    the end     Reducer.finish                    queued with the last bucket     at_end
                Pending.result                    await 0, then 1, then 2
                Bucket.scatter                    p.grad becomes the mean         untouched, on_mean; finished
                backward() returns

At other times: ``added`` to a reducer; ``on_local``, for a gradient that is not reduced (``no_sync``, too late, or
after a failure); ``on_failure`` of a hook or collective; ``why_unfinished``, if gradients are missing.
"""

from ddp_core.distributed import DistributedDataParallel
from ddp_core.errors import HookTimeoutError
from ddp_core.guard import NotAveragedError, NotAveragedWarning, set_guard, steps_locally
from ddp_core.hooks import GradBucket

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "HookTimeoutError",
    "NotAveragedError",
    "NotAveragedWarning",
    "set_guard",
    "steps_locally",
]
