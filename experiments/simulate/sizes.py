"""The step of a model of which only the number of parameters and the compute are known."""

from __future__ import annotations

from commhooks.planning.step_time import Bucket, Stage, Step

BYTES_PER_ELEMENT = {"all-reduce": 4, "fp16": 2, "bf16": 2}
BUCKET_BYTES = 25 * 2**20  # of a DDP
FORWARD_SHARE = 1 / 3  # of compute; the backward pass costs about twice as much


def step_of_size(parameters: float, bytes_per_parameter: float, compute: float) -> Step:
    """Return the step of a model that sends all its gradients by all-reduce, in buckets, during the backward pass."""
    buckets = max(1, round(4 * parameters / BUCKET_BYTES))
    payload = round(parameters * bytes_per_parameter / buckets)
    stage, forward = Stage(0.0, (("all-reduce", payload),)), FORWARD_SHARE * compute
    return Step(
        compute=compute,
        buckets=tuple(
            Bucket(min(compute, forward + (n + 1) / buckets * (compute - forward)), (stage,)) for n in range(buckets)
        ),
    )
