"""What a hook does, without a DistributedDataParallel: averaging tensors that the caller names."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.engine.engine import Engine
from commhooks.errors import CompressorError, SettingsError
from commhooks.hooks.handle import Handle, check_compressor_for, check_run_settings
from commhooks.hooks.stateless import group_or_default
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.making import make_compressor
from commhooks.scheduling.line import Line, ProcessGroupLine
from commhooks.scheduling.lockstep import LockstepLine, run_in_turns
from commhooks.state.loss_scale import Scaler
from commhooks.tensors import is_dense


class Exchanger(Handle):
    """Averaging of named tensors, such as pseudo-gradients, with the state, statistics and checkpoints of a hook.

    `tensors` names them: on every rank the same names, shapes and dtypes, dense and of floating point. Only names,
    shapes, dtypes and devices are read from it. The other arguments are those of `attach`; `line` replaces the process
    group for workers in one process, see `lockstep_lines` and `average_in_lockstep`.
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
        # Our own tensors, since state is kept by object and one tensor may be given under two names.
        self._like = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self._under_way = threading.Lock()
        if line is None:
            line = ProcessGroupLine(
                group_or_default(process_group), label="Exchanger", policy=policy, hook_timeout=hook_timeout
            )
        check_compressor_for(compressor, tensors, line)
        described = "\n".join(f"tensor {name}: shape {tuple(t.shape)}, {t.dtype}" for name, t in tensors.items())
        self._engine: Engine = Engine(
            compressor, line, fingerprint=described, residuals=residuals, atomic=atomic, may_join=False
        )
        self._model = _no_model
        self._engine.bind(list(self._like.items()))
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
        """Replace each tensor with its mean over the ranks; every rank must call this equally often.

        Raises `CompressorError` if the tensors are not the ones named at construction, which closes this exchanger and
        so fails the other ranks' calls, and `CollectiveError` if another rank fails. In both cases the tensors are
        unchanged.
        """
        if isinstance(self._engine.line, LockstepLine):
            if self._engine.line.world_size > 1:
                raise CompressorError("Exchanger.average: workers of one process meet in average_in_lockstep.")
            average_in_lockstep([self], [tensors])
            return
        futures = self.begin(tensors)
        try:
            for future in futures:
                future.wait()
        except Exception:
            self._under_way.release()
            raise
        self.end(tensors)

    def begin(self, tensors: Mapping[str, Tensor]) -> Sequence[torch.futures.Future[Tensor]]:
        """Copy the tensors and start averaging; once all futures are done, `end` writes the means back."""
        found = {name: (tuple(t.shape), t.dtype, t.device) for name, t in tensors.items()}
        wanted = {name: (tuple(t.shape), t.dtype, t.device) for name, t in self._like.items()}
        if found != wanted:
            self.close()
            wrong = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise CompressorError(
                f"rank {self._engine.line.rank}: Exchanger was made for other tensors: {wrong[0]!r} is "
                f"{found.get(wrong[0], 'missing')}, and was {wanted.get(wrong[0], 'not named')}."
            )
        if not self._under_way.acquire(blocking=False):
            raise CompressorError("Exchanger: the last average has not ended; one thread at a time may call it.")
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.places, [tensors[name] for name in bucket.names()])
        return [self._engine.run(bucket) for bucket in self._buckets]

    def end(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the means back."""
        for bucket in self._buckets:
            torch._foreach_copy_([tensors[name] for name in bucket.names()], bucket.places)
        self._under_way.release()

    def close(self) -> None:
        """Stop the background threads."""
        self._engine.stop()

    def _made_engine(self) -> Engine:
        return self._engine


@torch.no_grad()
def average_in_lockstep(exchangers: Sequence[Exchanger], tensors: Sequence[Mapping[str, Tensor]]) -> None:
    """Average over workers in this process, each with its own tensors; see `Exchanger.average`."""
    lines = [exchanger._engine.line for exchanger in exchangers if isinstance(exchanger._engine.line, LockstepLine)]
    if len(lines) < len(exchangers):
        raise CompressorError("average_in_lockstep: every Exchanger must have a line of lockstep_lines.")
    futures = [exchanger.begin(own) for exchanger, own in zip(exchangers, tensors, strict=True)]
    run_in_turns(lines)
    for future in (future for of_one in futures for future in of_one):
        future.value()
    for exchanger, own in zip(exchangers, tensors, strict=True):
        exchanger.end(own)


class _Flat:
    """Tensors of one dtype and device, presented as a bucket."""

    def __init__(self, number: int, names: Sequence[str], tensors: Mapping[str, Tensor], is_last: bool) -> None:
        self._number = number
        self._names = list(names)
        self._tensors = [tensors[name] for name in names]
        self._is_last = is_last
        sizes = [tensor.numel() for tensor in self._tensors]
        self._memory = self._tensors[0].new_zeros(sum(sizes))
        # In the order of each tensor's memory, as a DDP lays out gradients: state is saved in that order.
        flat = zip(self._memory.split(sizes), self._tensors, strict=True)
        self.places = [_in_order_of(tensor, part) for part, tensor in flat]

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


def _in_order_of(tensor: Tensor, memory: Tensor) -> Tensor:
    if not is_dense(tensor):
        return memory.view(tensor.shape)
    return memory.as_strided(tensor.shape, tensor.stride(), memory.storage_offset())


def _no_model() -> None:
    return None
