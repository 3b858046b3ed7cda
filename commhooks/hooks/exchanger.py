"""What a hook can do, without a DistributedDataParallel: average tensors that the caller names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.compressors import make_compressor
from commhooks.engine.engine import Engine
from commhooks.errors import CompressorError, SettingsError
from commhooks.hooks.handle import Handle, check_run_settings
from commhooks.hooks.stateless import group_or_default
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.scheduling.line import Line, ProcessGroupLine
from commhooks.scheduling.lockstep import LockstepScheduler, run_in_turns
from commhooks.state.loss_scale import Scaler


class Exchanger(Handle):
    """Average named tensors over ranks, such as pseudo-gradients: with a compressor's state, statistics, checkpoints.

    `tensors` says which: every rank names the same, of the same shapes and dtypes, dense and of floating point. Only
    names, shapes, dtypes and devices are taken from them. The other arguments are those of `attach`; `line` takes the
    place of a process group for workers in one process, see `lockstep_lines` and `average_in_lockstep`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        compressor: Compressor | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        policy: str = "fused",
        hook_timeout: float | None = None,
        scaler: Scaler | None = None,
        residuals: str = "fp32",
        atomic: bool = False,
        line: Line | None = None,
    ) -> None:
        check_run_settings("Exchanger", policy, hook_timeout)
        compressor = make_compressor(compressor) if isinstance(compressor, str) else compressor
        check_compressor("Exchanger", compressor)
        if not tensors:
            raise SettingsError("Exchanger(tensors={}): tensors must name at least one tensor.")
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or not tensor.is_floating_point():
                raise SettingsError(f"Exchanger: {name!r} must be dense and of floating point (got {tensor.dtype}).")
        compressor.check_parameters(tensors)
        self._like = dict(tensors)
        if line is None:
            line = ProcessGroupLine(
                group_or_default(process_group), label="Exchanger", policy=policy, hook_timeout=hook_timeout
            )
        described = "\n".join(f"tensor {name} of shape {tuple(t.shape)}, {t.dtype}" for name, t in tensors.items())
        self._engine: Engine = Engine(
            compressor, line, fingerprint=described, residuals=residuals, atomic=atomic, may_join=False
        )
        self._model = _no_model
        self._engine.bind(list(tensors.items()))
        if scaler is not None:
            self._engine.loss_scale.follow(scaler)
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, tensor in tensors.items():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
        self._buckets = [
            _Flat(number, names, self._like, number == len(kinds) - 1) for number, names in enumerate(kinds.values())
        ]

    @property
    def steps(self) -> int:
        """How many times `average` was called."""
        return self._engine.step

    @torch.no_grad()
    def average(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace each tensor by its mean over the ranks; every rank calls this, as often as the others.

        Raises `CompressorError` if the tensors are not those that were named, and `CollectiveError` if another rank
        fails; the tensors are unchanged then.
        """
        futures = self.begin(tensors)
        for future in futures:
            future.wait()
        self.end(tensors)

    def begin(self, tensors: Mapping[str, Tensor]) -> Sequence[torch.futures.Future[Tensor]]:
        """Copy the tensors, and hand them in; `end` writes the means back once all futures are done."""
        found = {name: (tuple(t.shape), t.dtype, t.device) for name, t in tensors.items()}
        wanted = {name: (tuple(t.shape), t.dtype, t.device) for name, t in self._like.items()}
        if found != wanted:
            wrong = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise CompressorError(
                f"rank {self._engine.line.rank}: Exchanger was made for other tensors: {wrong[0]!r} is "
                f"{found.get(wrong[0], 'missing')}, and was {wanted.get(wrong[0], 'not named')}."
            )
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.places, [tensors[name] for name in bucket.names()])
        return [self._engine.run(bucket) for bucket in self._buckets]

    def end(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the means back."""
        for bucket in self._buckets:
            torch._foreach_copy_([tensors[name] for name in bucket.names()], bucket.places)

    def close(self) -> None:
        """End what runs in the background."""
        self._engine.stop()

    def _made_engine(self) -> Engine:
        return self._engine


@torch.no_grad()
def average_in_lockstep(exchangers: Sequence[Exchanger], tensors: Sequence[Mapping[str, Tensor]]) -> None:
    """Let workers in this process average, each its own tensors; see `Exchanger.average`."""
    for exchanger, own in zip(exchangers, tensors, strict=True):
        exchanger.begin(own)
    schedulers = [exchanger._engine.line.scheduler for exchanger in exchangers]
    run_in_turns([scheduler for scheduler in schedulers if isinstance(scheduler, LockstepScheduler)])
    for exchanger, own in zip(exchangers, tensors, strict=True):
        exchanger.end(own)


class _Flat:
    """Tensors of one dtype and device, as a bucket."""

    def __init__(self, number: int, names: Sequence[str], tensors: Mapping[str, Tensor], is_last: bool) -> None:
        self._number = number
        self._names = list(names)
        self._tensors = [tensors[name] for name in names]
        self._is_last = is_last
        sizes = [tensor.numel() for tensor in self._tensors]
        self._memory = self._tensors[0].new_zeros(sum(sizes))
        flat = zip(self._memory.split(sizes), self._tensors, strict=True)
        self.places = [part.view(tensor.shape) for part, tensor in flat]

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._memory

    def parameters(self) -> list[Tensor]:
        return self._tensors

    def names(self) -> list[str]:
        return self._names

    def is_last(self) -> bool:
        return self._is_last


def _no_model() -> None:
    return None
