"""Training a sharded model with workers that live in one process: each averages its shard of the gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs import Codec
from commhooks.engine.engine import Engine
from commhooks.experiments.hooks import gather_of, make_hook
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask
from commhooks.experiments.timing.payloads import bucket_of_shards, rows_of
from commhooks.experiments.training.sharded import step_bytes
from commhooks.lockstep import lockstep_connections
from commhooks.scheduling.lockstep import LockstepConnection, run_in_turns
from experiments.studies.lockstep import Gradients, Trained, own_gradients

Tensors = Mapping[str, Tensor]


def train_sharded_in_lockstep(task: LoadedTask, hook: Spec, *, steps: int, workers: int) -> Trained:
    """Train the task's model, in place, as ranks that keep a shard each would, and return the outcome.

    Bytes are the bytes that a rank sends, including gathers. Losses are computed from the gathered parameters.
    """
    model, code = task.model, gather_of(hook)
    optimizer = task.optimizer()
    connections = lockstep_connections(workers)
    compressor = make_hook(hook, task.seed)
    engines = [Engine(compressor, connection, may_join=False) for connection in connections]
    named = dict(model.named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in named.items()}
    for engine in engines:
        engine.bind(list(kept.items()))
    diverged = None
    for step in range(steps):
        task.set_learning_rate(optimizer, step, steps)
        _gather(named, kept, workers, code)
        losses, gradients = own_gradients(task, step, workers)
        _scatter(engines, kept, gradients, named)
        _gather(named, kept, workers, None)
        optimizer.step()
        for name, parameter in named.items():
            kept[name].copy_(parameter.detach())
        if not math.isfinite(sum(losses)):
            diverged = step + 1
            break
    _gather(named, kept, workers, code)
    judged, sent = task.evaluate(), step_bytes(model, hook, workers)
    for engine in engines:
        engine.stop()
    return Trained(
        loss=judged["loss"],
        accuracy=judged.get("accuracy"),
        payload_bytes=sent,
        moved_bytes=sent,
        gradient_bytes=sum(4 * parameter.numel() for parameter in named.values()),
        residual=None,
        diverged=diverged,
        vnmse=math.nan,
    )


@torch.no_grad()
def _gather(named: Tensors, kept: Tensors, ranks: int, code: Codec | torch.dtype | None) -> None:
    """Set the model's parameters to the kept ones, as they are gathered."""
    for name, parameter in named.items():
        parameter.copy_(kept[name] if code is None else as_gathered(kept[name], ranks, code))


def as_gathered(parameter: Tensor, ranks: int, code: Codec | torch.dtype) -> Tensor:
    """Return a parameter as gathered if ranks send their shards in a code: whole blocks of it, and the rest uncoded."""
    rows = rows_of(parameter, ranks)  # W×chunk
    if isinstance(code, Codec):
        if coded := rows.shape[1] - rows.shape[1] % code.block:
            blocks = rows[:, :coded].reshape(-1, code.block)
            rows[:, :coded] = code.decode(code.encode(blocks, blocks.new_empty(0))).view(ranks, coded)
    else:
        rows = rows.to(code).to(parameter.dtype)
    return rows.view(-1)[: parameter.numel()].view(parameter.shape)


def _scatter(engines: Sequence[Engine], kept: Tensors, gradients: Sequence[Gradients], named: Tensors) -> None:
    """Set the model's gradients to their means, put together from each worker's shard."""
    buckets = [bucket_of_shards(own, [*kept.values()], len(engines)) for own in gradients]
    done = [engine.run(bucket) for engine, bucket in zip(engines, buckets, strict=True)]
    run_in_turns([engine.connection for engine in engines if isinstance(engine.connection, LockstepConnection)])
    for future in done:
        future.wait()
    rows = torch.stack([bucket.output() for bucket in buckets])  # W×chunks
    for parameter, shards in zip(named.values(), rows.split(buckets[0].chunks(), dim=1), strict=True):
        parameter.grad = shards.flatten()[: parameter.numel()].view(parameter.shape)
