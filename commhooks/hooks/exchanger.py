"""A hook's averaging, state and checkpoints for named tensors, without a DistributedDataParallel."""

from __future__ import annotations

import contextlib
import math
import numbers
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.compressors import Signum
from commhooks.compressors.codecs import Vote
from commhooks.engine.engine import Engine
from commhooks.errors import CommHooksError, CompressorError, SettingsError
from commhooks.hooks.flat import FlatBucket, InTurns, allocated, places_of
from commhooks.hooks.handle import Handle, check_compressor_for, check_flags, check_run_settings, checked_compressor
from commhooks.hooks.sockets import group_or_default
from commhooks.language.compressor import Compressor, inner_of
from commhooks.scheduling.line import Line, ProcessGroupLine
from commhooks.scheduling.lockstep import LockstepLine, run_in_turns
from commhooks.scheduling.policy import PolicyName
from commhooks.state.loss_scale import LossScale, Scaler
from commhooks.state.table import ResidualStorage
from commhooks.tensors import is_dense

_LIGHTEST, _HEAVIEST = 1e-30, 1e30
"""Weights that are not 0: fp32 holds the sum and the quotient of any number of them."""
WEIGHTS = f"0, or from {_LIGHTEST} to {_HEAVIEST}"
"""The numbers that are weights, in words."""


class Averaging:
    """A round of an `Exchanger`, under way since `begin`."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        buckets: Sequence[FlatBucket],
        futures: Sequence[torch.futures.Future[Tensor]],
        line: Line,
        in_turns: InTurns | None,
    ) -> None:
        self._in_turns = in_turns
        self._like = like
        self._buckets = buckets
        self._futures = futures
        self._line = line
        self._is_written = False

    @property
    def is_written(self) -> bool:
        """True once the means are written; another round may then use the memory."""
        return self._is_written

    @property
    def means(self) -> Mapping[str, Tensor]:
        """The means, by name, in the memory in which they arrived; waits for them, and raises as `wait`.

        Another round may use the memory once this object is gone or the means are written; after `write`, this raises
        `CompressorError`.
        """
        if self._is_written:
            raise CompressorError("Averaging.means: the means were written, and their memory may be in use again.")
        self.wait()
        return places_of(self._buckets)

    def done(self) -> bool:
        """Return whether the round is over: its means have arrived, or it has failed."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Wait until the means have arrived; raise the error if the round failed: see `Exchanger.average`.

        Raises `CompressorError` if it would wait forever, for workers of this process that take turns.
        """
        _check_turns("Averaging.wait", self._futures, self._line)
        for future in self._futures:
            future.wait()

    @torch.no_grad()
    def write(self, into: Mapping[str, Tensor]) -> None:
        """Wait for the means, then write them into tensors with the exchanger's names and shapes; call it once.

        Raises `CompressorError`, and writes nothing, if a tensor is missing, of another shape, dtype or device, if its
        elements share memory (`expand`), or if the means were written before.
        """
        if self._is_written:
            raise CompressorError(
                "Averaging.write: the means were written before, and their memory may be in use again."
            )
        if wrong := _misfits(self._like, into, overwritten=True):
            raise CompressorError(f"Averaging.write: {wrong[0]}; nothing was written.")
        self.wait()
        for bucket in self._buckets:
            torch._foreach_copy_([into[name] for name in bucket.names()], bucket.places)
        if self._in_turns is not None:
            self._in_turns.read()
        self._is_written = True


class Exchanger(Handle):
    """Averaging of named tensors, such as pseudo-gradients, with the state, statistics and checkpoints of a hook.

    `tensors` names them: on every rank the same names, shapes, strides and dtypes, dense and of floating point. Only
    names, shapes, strides, dtypes and devices are read from it; for tensors in pinned memory, `room` is pinned too. The
    other arguments are those of `attach`. `policy` is "fused", or the line's. `weighted`: `begin` takes this rank's
    weight in the mean; compressors that count votes raise `SettingsError`. Exchangers that share `memory` keep their
    tensors in it, and take turns: see `InTurns`.

    Making an exchanger has no effect on other ranks. Like PyTorch's collectives, exchangers are paired in the order of
    their first use, which must be the same on every rank: the first round, `open`, `replace` or `load_state_dict`.
    Ranks then compare `name`, tensors, compressor and settings, and raise `AttachError` if these differ. Exchangers
    that are equal in all of them are paired by order alone. A wrong pair of those is noticed only if ranks made them in
    one order: the first use that is out of that order on some ranks raises `AttachError`, and earlier means may be
    wrong. So give each a `name`. If first rounds may begin in any order, as in several threads, call `open` on each in
    one order before.

    `line` replaces the process group: exchangers that share one `ProcessGroupLine` share its thread and private group,
    each on a lane of its own, and begin all their rounds in the same order on every rank. Those of one line that have
    no name, or the same, are told apart by the order of making: there, one that a single rank makes, even if it closes
    it, needs a name of its own, or the others' first use raises `AttachError`. Errors name the round and the exchanger,
    "round 3, <name>". `lockstep_lines` are for workers in one process, see `average_in_lockstep`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        compressor: Compressor | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        policy: PolicyName | None = None,
        hook_timeout: float | None = None,
        scaler: Scaler | None = None,
        residuals: ResidualStorage = "fp32",
        atomic: bool = False,
        line: Line | None = None,
        name: str = "",
        weighted: bool = False,
        memory: InTurns | None = None,
    ) -> None:
        check_run_settings("Exchanger", "fused" if policy is None else policy, hook_timeout)
        check_flags("Exchanger", atomic=atomic, weighted=weighted)
        compressor = checked_compressor("Exchanger", compressor)
        if weighted:
            check_takes_weights(compressor)
        if not isinstance(tensors, Mapping) or not tensors:
            raise SettingsError(f"Exchanger(tensors={tensors!r:.80}): tensors must name at least one tensor.")
        for key, tensor in tensors.items():
            if tensor.layout != torch.strided or not tensor.is_floating_point():
                raise SettingsError(f"Exchanger: {key!r} must be dense and of floating point (got {tensor.dtype}).")
        loss_scale = LossScale()
        if scaler is not None:  # before the engine: it may be refused
            loss_scale.follow(scaler)
        if line is None:
            line = ProcessGroupLine(
                group_or_default(process_group), label="Exchanger", policy=policy or "fused", hook_timeout=hook_timeout
            )
        elif process_group is not None or hook_timeout is not None:
            raise SettingsError("Exchanger: process_group and hook_timeout belong to the line; pass them to it.")
        check_compressor_for(compressor, tensors, line)
        # Objects of our own, since state is kept by object and one tensor may be given under two names. Without memory,
        # unless the tensor has gaps: elements travel without.
        self._like = {
            key: tensor.detach() if is_dense(tensor) else torch.empty_like(tensor) for key, tensor in tensors.items()
        }
        self._is_weighted = weighted
        self._in_turns = memory
        self._engine: Engine = Engine(
            compressor,
            line,
            fingerprint="\n".join(f"tensor {key}: {_described(tensor)}" for key, tensor in self._like.items())
            + "\nweighted: True" * weighted,
            residuals=residuals,
            atomic=atomic,
            may_join=False,
            loss_scale=loss_scale,
            policy=policy,
            name=name,
        )
        self._engine.bind(list(self._like.items()))
        self._beginning = threading.Lock()
        self._last: list[torch.futures.Future[Tensor]] = []
        """The last round's futures; the next round waits for them."""
        self._memories: list[tuple[list[FlatBucket], weakref.ref[Averaging]]] = []
        """The buckets of each round; another may use them once the means are written or the `Averaging` is gone."""
        self._next: list[FlatBucket] = []
        """The buckets of the next round, if `room` was called for it."""

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self._engine.lane.title

    @property
    def steps(self) -> int:
        """The number of rounds begun so far."""
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
        self._check(tensors, overwritten=True)
        self.begin(tensors).write(tensors)

    @property
    @torch.inference_mode(False)  # as begin
    def room(self) -> Mapping[str, Tensor]:
        """The memory of the next round, by name: `begin()` averages the values written here, without a copy.

        Each tensor has the shape, dtype and device of the one named at construction, and undefined values until you
        write them.
        """
        with self._beginning:
            if not self._next:
                self._wait_for_the_last("Exchanger.room")
                self._next = self._free_buckets()
            return places_of(self._next)

    @torch.inference_mode(False)  # as Engine.run; rounds also share memory
    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Tensor] | None = None, *, weight: float | None = None) -> Averaging:
        """Copy the tensors and start averaging; the tensors may change as soon as this returns.

        Without tensors, the values written into `room` are averaged. With `weighted`, `weight` is this rank's weight in
        the mean: 0, or from 1e-30 to 1e30, so that fp32 holds the sum; if all weights are 0, so are the means. Several
        rounds may be begun before the first one's means are written. Residuals of one round are part of the next, so
        this waits until the previous round is over. Raises as `average`.
        """
        if not (is_weight(weight) if self._is_weighted else weight is None):
            wanted = WEIGHTS if self._is_weighted else "None unless the Exchanger is weighted"
            self.fail(f"begin(weight={weight!r}): weight must be {wanted}.")
        if tensors is not None:
            self._check(tensors)
        elif not self._next:
            self.fail("begin without tensors sends what was written into `room`, but nobody has asked for that.")
        with self._beginning:
            self._wait_for_the_last("Exchanger.begin")
            buckets, self._next = self._next or self._free_buckets(), []
            for bucket in buckets:
                bucket.weight = weight
                if tensors is not None:
                    torch._foreach_copy_(bucket.places, [tensors[name] for name in bucket.names()])
            self._last = [self._engine.run(bucket) for bucket in buckets]
            begun = Averaging(self._like, buckets, self._last, self._engine.line, self._in_turns)
            self._memories.append((buckets, weakref.ref(begun)))
            return begun

    @property
    def is_in_use(self) -> bool:
        """True while a round's tensors are being written, averaged or read in this exchanger's memory."""
        rounds = (of_round() for _, of_round in self._memories)
        return bool(self._next) or any(last is not None and not last.is_written for last in rounds)

    def memories(self) -> list[Tensor]:
        """Return the memory of all rounds so far, one tensor for each dtype and device of a round."""
        buckets = [bucket for of_round, _ in self._memories for bucket in of_round]
        return [bucket.buffer() for bucket in (*buckets, *self._next)]

    def open(self) -> None:
        """Connect to the other ranks now rather than at the first round; raise `AttachError` if they disagree."""
        self._engine.open(next(iter(self._like.values())).device)

    def fail(self, what: str) -> NoReturn:
        """Raise `CompressorError`, and close the lane, so that the other ranks, which may have begun, learn of it."""
        why = f"rank {self._engine.line.rank}: {what}"
        if isinstance(self._engine.line, LockstepLine):  # nobody has begun, so nothing is lost
            raise CompressorError(why)
        self.stop(why)
        raise CompressorError(f"{why} It is closed now: other ranks' calls fail.")

    def stop(self, why: str) -> None:
        """Close the lane because of a failure outside it, of which the other ranks learn."""
        self._engine.stop(why)

    @property
    def failure(self) -> CommHooksError | None:
        """The error that ended all rounds; None if there was none, and after `close`."""
        why = self._engine.why_stopped
        return self._engine.failure() or (CompressorError(why) if why else None)

    def close(self) -> None:
        """Close the lane; the background threads stop with the line's last one. Later rounds fail."""
        self._engine.stop()

    def _made_engine(self) -> Engine:
        return self._engine

    def _candidate(self, compressor: Compressor | str) -> tuple[Compressor, SettingsError | None]:
        candidate, refusal = super()._candidate(compressor)
        if self._is_weighted and refusal is None:
            try:
                check_takes_weights(candidate)
            except SettingsError as error:
                refusal = error
        return candidate, refusal

    def _check(self, tensors: Mapping[str, Tensor], *, overwritten: bool = False) -> None:
        """Raise `CompressorError`, and close the lane, if tensors do not match those named at construction."""
        wrong = _misfits(self._like, tensors, overwritten=overwritten)
        if wrong:
            self.fail(f"Exchanger was made for other tensors: {wrong[0]}.")

    def _wait_for_the_last(self, caller: str) -> None:
        _check_turns(caller, self._last, self._engine.line)
        for future in self._last:
            with contextlib.suppress(Exception):  # whoever waits for that round is told; this one fails by itself
                future.wait()

    def _free_buckets(self) -> list[FlatBucket]:
        """Return buckets that no round uses any more, or new ones."""
        if self._in_turns is not None:
            self._in_turns.take(self)
        for buckets, of_round in reversed(self._memories):  # the last round's: views and plans of it are kept
            last = of_round()
            if last is None or last.is_written:
                self._memories.remove((buckets, of_round))
                return buckets
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, tensor in self._like.items():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
        take = allocated if self._in_turns is None else self._in_turns.part
        return [
            FlatBucket(number, names, self._like, number == len(kinds) - 1, take)
            for number, names in enumerate(kinds.values())
        ]


@torch.no_grad()
def average_in_lockstep(exchangers: Sequence[Exchanger], tensors: Sequence[Mapping[str, Tensor]]) -> None:
    """Average over workers in this process, each with its own tensors; see `Exchanger.average`."""
    lines = [exchanger._engine.line for exchanger in exchangers if isinstance(exchanger._engine.line, LockstepLine)]
    if len(lines) < len(exchangers):
        raise CompressorError("average_in_lockstep: every Exchanger must have a line of lockstep_lines.")
    for exchanger, own in zip(exchangers, tensors, strict=True):
        exchanger._check_open("average_in_lockstep")
        exchanger._check(own, overwritten=True)
    rounds = [exchanger.begin(own) for exchanger, own in zip(exchangers, tensors, strict=True)]
    run_in_turns(list(dict.fromkeys(lines)))  # those that share one take its turn once
    for one, own in zip(rounds, tensors, strict=True):
        one.write(own)


def is_weight(value: object) -> bool:
    """Return whether a rank can have this weight: a number of `WEIGHTS`, or a tensor of one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    return number == 0 or _LIGHTEST <= number <= _HEAVIEST


def check_takes_weights(compressor: Compressor) -> None:
    """Raise `SettingsError` if a compressor's mean is a vote, in which ranks cannot be weighted."""
    if isinstance(compressor, Signum) or isinstance(getattr(compressor, "codec", None), Vote):
        raise SettingsError(f"weighted=True: {compressor} counts votes, which have no weights.")
    for inner in inner_of(compressor):
        check_takes_weights(inner)


def _check_turns(caller: str, futures: Sequence[torch.futures.Future[Tensor]], line: Line) -> None:
    """Raise `CompressorError` if a round of workers that take turns is under way: none of them can while one waits."""
    if isinstance(line, LockstepLine) and not all(future.done() for future in futures):
        raise CompressorError(f"{caller}: the last round is under way; let the workers take their turns.")


def _misfits(like: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, overwritten: bool) -> list[str]:
    """List mismatches with the named tensors, in words; if none and `overwritten`, tensors that cannot be written."""
    found, wanted = (
        {name: (tuple(t.shape), t.dtype, t.layout, t.device) for name, t in named.items()} for named in (tensors, like)
    )
    wrong = [
        f"{name!r} is {found.get(name, 'missing')}, and was {wanted.get(name, 'not named')}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if wrong or not overwritten:
        return wrong
    return [
        f"elements of {name!r} share memory, so no mean can be written into it"
        for name, t in tensors.items()
        if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True))
    ]


def _described(tensor: Tensor) -> str:
    """Return the properties that all ranks must agree on, strides included: elements travel in the order of memory."""
    strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tuple(strides)}"
