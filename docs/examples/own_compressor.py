"""A compressor of your own, in its own file: average a few random rows of every parameter.

torchrun --nproc-per-node 2 own_compressor.py
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.language import AllReduce, BucketView, Compressor, Context, Exchange, Judge, Loss
from commhooks.language.randomness import seeded_places, stable_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomRows(Compressor):
    """Average one in `every` rows of each parameter, at random; a vector's rows are its elements."""

    every: int = 4

    def loss(self, name: str, parameter: torch.Tensor) -> Loss:
        """Return the expected share of the squared norm that is not sent: `ErrorFeedback` keeps it."""
        return Loss(1 - 1 / self.every)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Average the rows; all ranks draw the same ones, from the parameter's name and the step."""
        parts, chosen = [], []
        for slot in bucket.filled:
            M = slot.form().view(slot.parameter.shape[:1].numel(), -1)  # gradient + residual
            seed = stable_seed(slot.name, context.step)
            chosen.append(seeded_places(len(M), -(-len(M) // self.every), seed, M))
            # The second part shows an inf in any row.
            parts += [slot.part(M[chosen[-1]]), slot.part(M.abs().amax().view(1))]
        if not parts:  # no parameter has an element
            return
        answers = yield AllReduce(*parts, average=True, last=True)
        overflowing = bucket.filled[0].tile.in_own_range(answers[::2])  # in fp16; otherwise nothing
        finite = yield Judge(*answers, *overflowing)
        for slot, rows, mean in zip(bucket.filled, chosen, answers[::2], strict=True):
            M = slot.form().view(slot.parameter.shape[:1].numel(), -1)
            slot.keep(M.index_fill_(0, rows, 0.0).flatten(), finite)  # the new residual: what was not sent
            averaged = torch.zeros_like(M).index_copy_(0, rows, mean).flatten()
            slot.write(averaged + torch.where(finite, 0.0, torch.nan))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 8))
    hooks = commhooks.attach(model, commhooks.ErrorFeedback(inner=RandomRows(every=4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(100):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs[:, :8]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ratio = hooks.last_step().ratio
    print(f"rank {dist.get_rank()}: loss {loss.item():.6f} with messages {ratio:.1f} times smaller")
    hooks.close()
    dist.destroy_process_group()
