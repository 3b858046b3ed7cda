"""DiLoCo: once every `every` steps, ranks average their progress, and an outer optimizer steps with the mean.

Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1;
Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, for fragments, delay and mixing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from commhooks.communicators.beginning import agree, share_from_rank_0
from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.diloco.counts import DiLoCoStatistics
from commhooks.diloco.cutting import Arrangement
from commhooks.diloco.inner import Inner, OptimizerState
from commhooks.diloco.loading import misfits
from commhooks.diloco.moments import Moments
from commhooks.diloco.outer import Outer, made_of
from commhooks.diloco.parts import BUFFERS, Buffers, Fragment, PartsFeed
from commhooks.diloco.shards import shaped_like
from commhooks.diloco.starting import Beginning, Schedule, average_over, group_of_ranks, mismatch, trained
from commhooks.errors import CheckpointError, CommHooksError, CompressorError, SettingsError
from commhooks.exchange.exchanger import WEIGHTS, TensorChannel, is_weight
from commhooks.exchange.handle import Handle
from commhooks.exchange.options import Options, Settings, check_belongs_to_connection, check_flags, settings_of
from commhooks.exchange.pieces import WITH_DTENSORS, PiecesWatch
from commhooks.language.compressor import Compressor
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.saving.saved import Differences, Saved, read
from commhooks.scheduling.connection import Connection
from commhooks.scheduling.ledger import total
from commhooks.scheduling.lockstep import LockstepConnection, run_in_turns
from commhooks.tensors import all_finite, cloned, local
from commhooks.units import counted
from commhooks.unwrapping import bare, difference_of, everything_kept, kept_buffers, plain_name
from ddp_core.guard import steps_locally

_EXCHANGED = (
    "DiLoCo exchanges the parameters that required a gradient when it was made; make it again after freezing, adding "
    "or replacing any."
)
_INSIDE = "within outer_parameters(): the parameters are the outer copies, and this rank's own would be lost"

_OUTER_OF_PIECES = (
    "The outer copies of a sharded model are this rank's shards: take an outer optimizer that computes each element by "
    "itself, such as SGD."
)


class DiLoCo:
    """Training in which ranks communicate every `every` steps: call `step` after each step of the optimizer.

    Each rank trains its own model with its own `optimizer`. At a fragment's turn, the ranks average their differences
    from its outer copy, compressed by `compressor`. The outer optimizer then steps the outer copy with that
    mean as gradient, and the ranks continue from there.

    - `model` is a plain module or, inside a site, a DistributedDataParallel or FSDP2's shards; DiLoCo then averages
      over the sites' ranks with the same shard. All ranks begin with rank 0's parameters and buffers. Frozen parameters
      are left out of the rounds. At the last fragment's turn, floating-point buffers that are saved (persistent) are
      averaged uncompressed, others copied from rank 0. Left as each rank has them are frozen parameters and buffers
      without bytes of their own (weights quantised to codes, in a subclass with a `__torch_dispatch__`; sparse and
      expanded tensors), buffers that are not saved and whose shapes differ between ranks, and frozen parameters and
      buffers named in the model's `_ddp_params_and_buffers_to_ignore`, or in `fully_shard`'s `ignored_params`.
    - `optimizer` trains all parameters of the model that require a gradient, and no others. Optimizers with
      `train()` and `eval()`, such as schedule-free ones, are rejected: their point of evaluation would differ
      between ranks. Learning-rate schedules, including that of `outer_optimizer`, are left to the caller.
    - `outer` is the outer optimizer. "average": outer copies become the mean of the ranks' parameters; "published":
      SGD with a rate of 0.7 and a Nesterov momentum of 0.9, as in DiLoCo's paper; "sgd:rate=0.5,momentum=0.6": other
      figures; or a function that makes an optimizer of the outer copies. "auto" is "average" in rounds of up to 100
      steps and with SparseLoCo, where that was measured to be best, and otherwise "published"; `schedule.outer` says
      which.
    - `fragments` is the number of parts sent one after another in each round, or shell patterns for each part's
      parameters. A number deals layers to parts in turn; arrangement="sequential" cuts runs, "even" deals parameters.
    - `delay`: the number of steps between sending a fragment and using its mean, in which training continues.
    - `mixing`: parameters become mixing·(their value then) + (1 - mixing)·(outer copy). 0: they become the outer copy;
      1: they stay as they are.
    - `on_host`: outer copies, messages and residuals are kept in the host's memory.
    - `weighted`: ranks count by `weight`, which is 1 until you set it, for example to the tokens that a rank has
      trained on since its last exchange. Weight 0 leaves a rank's progress and floating-point buffers out of the means,
      but not what the compressor still owes of its earlier rounds.
    - `optimizer_state`: "local" leaves the inner optimizer's state as each rank has it. "mean" averages it with the
      parameters, uncompressed: every floating-point tensor in the state of a fragment's parameters. Counts of steps
      must then be equal on all ranks.
    - `Options` describes the options, of which all but `scaler` and `guard` apply. With a `connection` of
      `lockstep_connections`, workers of one process, whose models must begin equal, exchange in `step_in_lockstep`.

    Memory, in bytes for each fp32 parameter: 4 for the outer copy, 4 for the message, the outer optimizer's state (SGD
    with momentum: 4, without: 0), and the compressor's state (a residual: 4; the server error of two hops: 4/W). With
    optimizer_state="mean", 4 more for each moment: its message. Fragments whose
    exchanges never overlap share the memory of their messages.

    Raises `SettingsError` on every rank if settings cannot work, or if ranks differ in settings or parameters.
    """

    keeps_own_model = True
    """Each rank has its own model between rounds, and its own optimizer state always."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        *,
        every: int,
        compressor: Compressor | str = "all-reduce",
        outer: Outer | str = "auto",
        fragments: int | Sequence[str | Sequence[str]] = 1,
        arrangement: Arrangement = "strided",
        delay: int = 0,
        mixing: float = 0.0,
        on_host: bool = False,
        weighted: bool = False,
        optimizer_state: OptimizerState = "local",
        connection: Connection | None = None,
        **options: Unpack[Options],
    ) -> None:
        if connection is not None and not isinstance(connection, LockstepConnection):
            raise SettingsError(
                f"DiLoCo(connection={connection!r}): connection must be one of lockstep_connections; "
                "pass a process_group."
            )
        group = group_of_ranks(options.get("process_group")) if connection is None else None
        try:
            settings = settings_of("DiLoCo", options)
            if connection is not None:
                check_belongs_to_connection("DiLoCo", options)
            check_flags("DiLoCo", on_host=on_host, weighted=weighted)
            beginning = Beginning.checked(
                model,
                optimizer,
                every,
                compressor,
                outer,
                fragments,
                arrangement,
                delay,
                mixing,
                weighted,
                optimizer_state,
                group,
            )
        except Exception as error:  # whatever it is, the other ranks are waiting for an answer
            agree("DiLoCo", group, error)
            raise
        agree("DiLoCo", group, beginning.fingerprint())
        self.process_group = group
        """The process group whose ranks average together; None for workers of one process."""
        self.schedule: Schedule = beginning.schedule
        self.steps: int = 0
        """The number of calls of `step`, including those before a resume."""
        self._calls = 0
        self._model = bare(model)
        self._names_of_buffers = self._all_buffers()
        kept = everything_kept(self._model, beginning.named.values())
        share_from_rank_0("DiLoCo", kept, kept_buffers(self._model, saved=False), group)
        self._make_parts(beginning, on_host=on_host)
        self._outer_optimizer = made_of(
            beginning.outer, [held for one in self._fragments for held in one.outer.values()], group
        )
        self._is_weighted = weighted
        self._weight = 1.0
        self._open_exchange(beginning.compressor, settings, connection)
        steps_locally(self._outer_optimizer)
        is_mean = optimizer_state == "mean"
        self._inner = Inner(beginning.optimizer, self._parts[0].exchanger.fail, keeps_counts=is_mean)
        self._moments = self._make_moments(settings, on_host=on_host) if is_mean else []
        self._held = self._inner.parameters()
        self._looks = self._look_at_pieces() if self.rank_and_world_size[0] == 0 else []
        self._rounds = self._dropped = 0
        self._is_closed = self._is_at_outer = False

    @property
    def outer_optimizer(self) -> Optimizer:
        """The optimizer of the outer copies."""
        return self._outer_optimizer

    @property
    def trained_parameters(self) -> list[Tensor]:
        """The parameters that are exchanged."""
        return list(self._named.values())

    @property
    def weight(self) -> float:
        """The weight of this rank in the exchanges that begin from now on: 1 until you set it. It is not saved.

        Raises `SettingsError` if it is set to something other than 0 or a number from 1e-30 to 1e30, or without
        `weighted`.
        """
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        if not self._is_weighted or not is_weight(value):
            wanted = f"must be {WEIGHTS}" if self._is_weighted else "needs DiLoCo(weighted=True)"
            raise SettingsError(f"DiLoCo.weight {wanted} (got {value!r}).")
        self._weight = float(value)

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The rank of this process and the number of ranks that average together."""
        return self.exchange.connection.rank, self.exchange.connection.world_size

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a step of the optimizer, begin the exchanges whose turn it is, and use the means that are due.

        Every rank must call it equally often: once after each step, including steps that a gradient scaler skips; with
        gradient accumulation, once per optimizer step. Raises the error of an exchange that failed, naming round,
        fragment and rank, and `CompressorError` on every rank if the optimizer took two steps, if parameters were
        frozen, added or replaced, or if a saved buffer was added. After an error within a step, whatever its cause,
        every later call raises.
        """
        if self.process_group is None and self.rank_and_world_size[1] > 1:
            raise CompressorError("DiLoCo.step: workers of one process meet in step_in_lockstep.")
        self.check_step()
        with self._whole():
            self._begin_step()
            if self.process_group is None:
                run_in_turns([self._lockstep_connection()])
            self._end_step()

    def pass_over(self) -> None:
        """Leave a step of the optimizer uncounted, as before training with infrequent communication begins."""
        self.check_step()

    @torch.no_grad()
    def begin_at_mean(self) -> None:
        """Set the parameters and outer copies to the mean of the ranks' parameters, uncompressed; every rank calls it.

        Use it if the models were trained in another way since construction. Ranks with a parameter that is not finite
        are left out. Raises `CompressorError` if none is left, or for workers of one process.
        """
        if self.process_group is None:
            raise CompressorError("DiLoCo.begin_at_mean: workers of one process have no process group.")
        self.check_step()
        with self._whole():
            for moments in self._moments:
                moments.begin(self.steps)
            means = [moments.take() for moments in self._moments]  # raises, if it does, before anything is changed
            is_averaged = average_over(self.trained_parameters, self.process_group, self._shards)
        if not is_averaged:
            raise CompressorError("DiLoCo.begin_at_mean: on every rank, parameters are not finite.")
        for moments, of_fragment in zip(self._moments, means, strict=True):
            moments.apply(of_fragment, 0.0)
        self._inner.clear(self.trained_parameters)  # where they were not, moments would spoil them again
        for fragment in self._fragments:
            fragment.begin_here()

    def check_step(self) -> None:
        """Count the optimizer's step; raise, before anything changes, if DiLoCo's cannot be taken.

        An earlier one that failed is a reason too.
        """
        if self._is_closed:
            raise CompressorError("DiLoCo.step: this DiLoCo was closed.")
        self._inner.count()  # first: whatever fails here, the optimizer's next step is not to blame
        if (failure := self._failure()) is not None:
            raise type(failure)(
                f"DiLoCo.step: not taken, because each rank has trained alone since an earlier failure: {failure} Make "
                "DiLoCo again on every rank, and load the last checkpoint."
            )
        if self._is_at_outer:
            self.fail(f"DiLoCo.step {_INSIDE}.")
        self._check_parameters()

    def _failure(self) -> CommHooksError | None:
        return next((failure for part in self._parts if (failure := part.exchanger.failure) is not None), None)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """End all exchanges if what is done here fails: half a step leaves ranks that differ, and whose turns differ.

        So does an interrupt, which a notebook survives; the next step would find its round neither due nor free.
        """
        try:
            yield
        except BaseException as error:
            if self._failure() is None:
                rank, first = self.rank_and_world_size[0], next(iter(self.exchange.values()))
                first.stop(f"rank {rank}, step {self.steps}: {type(error).__name__}: {error}")
            raise

    @torch.inference_mode(False)  # the outer optimizer's state, for example, is changed in later steps
    @torch.no_grad()
    def _begin_step(self) -> None:
        self.steps += 1
        self._calls += 1
        due = self.steps + self.schedule.delay
        for part in (*self._parts, *self._moments):
            if part.is_turn(due, self.schedule.every):
                part.begin(due, self.weight if self._is_weighted else None)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _end_step(self) -> None:
        self._shards.reshard()
        taken = [(one, one.take()) for one in self._moments if one.due == self.steps]  # may raise: nothing has changed
        for fragment in self._fragments:
            if fragment.due == self.steps:
                for moments, means in taken:
                    if moments.fragment is fragment:
                        moments.apply(means, self.schedule.mixing)
                self._finish(fragment)
        if self._buffers is not None and self._buffers.due == self.steps:
            self._buffers.apply(self._buffers.take())

    def _finish(self, fragment: Fragment) -> None:
        """Use a fragment's mean, or drop it if it is not finite; all ranks decide alike."""
        means = fragment.take()
        self._rounds += 1
        if self._shards.all_agree(bool(all_finite(means.values()))):
            fragment.apply(means, self._outer_optimizer)
            fragment.mix(self.schedule.mixing)
            return
        self._dropped += 1
        before = self._inner.cleared
        fragment.mix(0.0)
        for other in self._fragments:  # where it came from, all of them are spoilt, and would spoil this one again
            other.mend()
            self._inner.clear(other.named.values())
        cleared = self._inner.cleared - before
        warnings.warn(
            f"commhooks: round {fragment.exchanger.steps - 1} of {fragment.exchanger.name} was dropped, as its mean is "
            "not finite; training goes on from the outer copies."
            + f" The optimizer's state of {cleared} parameters, which was not finite here, was cleared."
            * (cleared > 0),
            stacklevel=6,  # who calls `step`: the decorators of `_end_step` have frames of their own
        )

    def _check_parameters(self) -> None:
        """Fail on all ranks if the trained parameters, or the saved buffers, are not those of construction."""
        self._shards.reshard()
        now = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        is_same = len(now) == len(self._named) and all(map(operator.is_, now, self._named.values()))
        if not is_same and (change := difference_of(self._named, trained(self._model))):
            self.fail(f"{change}: {_EXCHANGED}")
        if new := self._all_buffers() - self._names_of_buffers:
            if added := sorted(new & kept_buffers(self._model).keys()):
                self.fail(
                    f"buffer {added[0]!r} was added since DiLoCo was made, so that each rank would keep its own: "
                    "register it before, or with persistent=False."
                )
            self._names_of_buffers |= new
        if self._inner.parameters() != self._held and (wrong := mismatch(self._inner.optimizer, self._named)):
            self.fail(wrong)

    def _all_buffers(self) -> set[str]:
        """Return the names of all buffers that are not empty."""
        held = self._model.named_buffers(remove_duplicate=False)
        return {plain_name(name) for name, buffer in held if buffer.numel()}

    def _replacement(self) -> str:
        """Return a sentence about the first exchanged parameter that the model does not have any longer; or ""."""
        self._shards.reshard()
        now = {plain_name(name): one for name, one in self._model.named_parameters(remove_duplicate=False)}
        change = difference_of(self._named, {name: now[name] for name in self._named if name in now})
        return f"{change}: {_EXCHANGED}" if change else ""

    def _lockstep_connection(self) -> LockstepConnection:
        assert isinstance(self.exchange.connection, LockstepConnection), "there is a process group otherwise"
        return self.exchange.connection

    # --- construction -------------------------------------------------------------------------------------------------

    def _make_parts(self, beginning: Beginning, *, on_host: bool) -> None:
        names, turns = self.schedule.fragments, self.schedule.turns
        self._named, self._shards = beginning.named, beginning.shards
        self._fragments = [
            Fragment({name: self._named[name] for name in own}, turn, on_host=on_host)
            for own, turn in zip(names, turns, strict=True)
        ]
        self._buffers = (
            Buffers(self._model, beginning.buffers, self.schedule.every, weighted=beginning.weighted)
            if beginning.buffers
            else None
        )
        self._parts = [*self._fragments, *([self._buffers] if self._buffers is not None else [])]

    def _look_at_pieces(self) -> list[PiecesWatch]:
        """Warn of optimizers that take shards for whole matrices; each fragment has an outer step of its own."""
        return [
            PiecesWatch(self._inner.optimizer, self._named, WITH_DTENSORS),
            PiecesWatch(self._outer_optimizer, self._named, _OUTER_OF_PIECES, steps=len(self._fragments)),
        ]

    def _make_moments(self, settings: Settings, *, on_host: bool) -> list[Moments]:
        return [
            Moments(
                fragment,
                label,
                self._inner.optimizer,
                settings,
                self.exchange.connection,
                self._shards,
                on_host=on_host,
                weighted=self._is_weighted,
            )
            for label, fragment in zip(self.exchange, self._fragments, strict=False)  # buffers come last
        ]

    def _open_exchange(self, compressor: Compressor, settings: Settings, connection: Connection | None) -> None:
        count = len(self._fragments)
        labels = [f"fragment {number} of {count}" for number in range(count)] + [BUFFERS] * (self._buffers is not None)
        parts = dict(zip(labels, self._parts, strict=True))
        feed = PartsFeed(
            {label: part.like for label, part in parts.items()},
            weighted=self._is_weighted,
            in_turns=not self.schedule.overlaps,
            group=self.process_group,
        )
        compressors = dict.fromkeys(labels, compressor) | {BUFFERS: AllReduceMean()}
        self.exchange: Handle[TensorChannel] = Handle(feed, compressors, settings, connection)
        """The exchange of all parts, by "fragment 0 of 3" and so on, and "buffers": statistics, memory, `replace`."""
        for label, part in parts.items():
            part.exchanger = self.exchange[label]
        self.exchange.open()  # ranks learn of a failure from now on, also of one before the first exchange

    def fail(self, what: str) -> NoReturn:
        """Raise `CompressorError` here, and fail the other ranks' steps with it."""
        self._parts[0].exchanger.fail(what)

    # --- what users ask -----------------------------------------------------------------------------------------------

    def statistics(self) -> DiLoCoStatistics:
        """Return this rank's counts so far."""
        traffic = total(
            [
                *(part.exchanger.statistics() for part in self._parts),
                *(one for moments in self._moments for one in moments.statistics()),
            ]
        )
        largest = max(
            sum(part.exchanger.last_step().moved_bytes for part in self._parts if part.turn == turn)
            + sum(moments.last_bytes for moments in self._moments if moments.turn == turn)
            for turn in self.schedule.turns  # buffers are sent at the last fragment's turn
        )
        return DiLoCoStatistics(
            steps=self.steps,
            rounds=self._rounds,
            dropped_rounds=self._dropped,
            cleared=self._inner.cleared,
            bytes_per_step=traffic.moved_bytes / max(1, self._calls),
            peak_bytes_per_step=largest / max(1, self.schedule.delay),
            traffic=traffic,
        )

    def __str__(self) -> str:
        """Return a summary."""
        rank, ranks = self.rank_and_world_size
        compressor = next(iter(self.exchange.values())).compressor
        fragments = counted(len(self._fragments), "fragment")
        return (
            f"DiLoCo: {compressor}, outer {self.schedule.outer}, {fragments} every {self.schedule.every} steps, "
            f"rank {rank} of {ranks}\n"
            f"{self.statistics()}"
        )

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Give the model the outer copies, with all means under way applied; restore its own values on exit.

        Use it for evaluation: parameters are then the same on every rank, but buffers are this rank's own. `step`,
        saving and loading raise an error inside; afterwards training continues unchanged. It takes the memory of
        another copy of the parameters and, while fragments are under way, of their outer state.
        """
        if self._is_at_outer:  # within another evaluation
            yield
            return
        if change := self._replacement():
            self.fail(f"outer_parameters: {change}")
        under_way = sorted((one for one in self._fragments if one.due), key=lambda one: one.due or 0)  # as they end
        for fragment in under_way:
            fragment.means()  # raises what it failed of before anything is changed
        own = {name: local(parameter).clone() for name, parameter in self._named.items()}
        self._is_at_outer = True
        try:
            self._show_outer(under_way)
            yield
        finally:
            self._is_at_outer = False
            with torch.no_grad():
                self._shards.reshard()
                for name, parameter in self._named.items():
                    local(parameter).copy_(own[name])

    @torch.inference_mode(False)  # what is made in it, such as the momentum to go back to, could not be trained on
    @torch.no_grad()
    def _show_outer(self, under_way: Sequence[Fragment]) -> None:
        self._shards.reshard()
        before = [fragment.foresee(self._outer_optimizer) for fragment in under_way]
        for fragment in self._fragments:
            fragment.mix(0.0)
        for fragment, kept in reversed([*zip(under_way, before, strict=True)]):
            fragment.go_back(self._outer_optimizer, kept)

    # --- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; wait for the means under way, which are saved with the steps that await them.

        It holds the outer copies, the outer optimizer, and the compressor's state; per-rank state is only in that
        rank's state_dict. The model and the optimizer differ by rank, so save them with it on every rank, as
        `save_checkpoint` does. Call it on every rank after the same `step`. Raises `CheckpointError` if the optimizer
        took a step that was not counted, if an exchanged parameter was replaced, or after an exchange that failed.
        """
        state: dict[str, Any] = cloned(self.snapshot().as_dict())
        return state

    def snapshot(self) -> Saved:
        """Return the same as `state_dict`, with the tensors themselves instead of copies."""
        if self._is_at_outer:
            raise CheckpointError(f"saving {_INSIDE}.")
        if (failure := self._failure()) is not None:
            raise CheckpointError(
                f"saving after a failure; resume from the last checkpoint. The failure was: {failure}"
            )
        if self._inner.is_ahead:
            raise CheckpointError("the optimizer took a step that was not counted: save after diloco.step().")
        if change := self._replacement():
            raise CheckpointError(f"saving: {change}")
        due = {str(number): part.state() for number, part in enumerate(self._parts) if part.due is not None}
        shared = {
            "step": self.steps,
            "rounds": self._rounds,
            "dropped_rounds": self._dropped,
            "schedule": self.schedule.as_dict(),
            "due": due,
            "moments_due": {str(n): one.state() for n, one in enumerate(self._moments) if one.due is not None},
            "outer": {name: copy for fragment in self._fragments for name, copy in fragment.outer.items()},
            "outer_optimizer": self._outer_optimizer.state_dict(),
            "outer_optimizer_class": type(self._outer_optimizer).__name__,
        }
        return dataclasses.replace(self.exchange.snapshot(), shared=shared)

    def model_state(self) -> dict[str, Any]:
        """Return the model's state_dict with outer copies in place of the trained parameters, which all ranks share.

        Raises `CheckpointError` if one of them was replaced.
        """
        if change := self._replacement():
            raise CheckpointError(f"model_state: {change}")
        of_parameter = {self._named[name]: outer for one in self._fragments for name, outer in one.outer.items()}
        state = dict(self._model.state_dict())
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if name in state and parameter in of_parameter:
                state[name] = shaped_like(parameter, of_parameter[parameter])
        return state

    def differences(self, saved: Saved, rules: LoadRules) -> list[str]:
        """List every difference between a saved state and this run that would cause an error on loading."""
        if self._is_at_outer:
            return [f"it is loaded {_INSIDE}"]
        found = misfits(saved.shared, self.schedule, self._parts, self._outer_optimizer, rules)
        return found or self.exchange.differences(saved, rules)

    def load_state_dict(self, state: Mapping[str, Any] | CheckpointError, **rules: Unpack[LoadOptions]) -> None:
        """Restore a `state_dict`; call it on every rank, which must also load its own model and optimizer.

        `settings="change"` also allows another `every`, `delay`, `mixing`, `outer` or `optimizer_state`. See
        `Handle.load_state_dict`.
        """
        self.restore(read(state), LoadRules(**rules))

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, saved: Saved | CheckpointError, rules: LoadRules, differences: Differences | None = None) -> None:
        """Restore a state, after looking for these `differences`; see `Handle.restore`."""
        self.exchange.restore(saved, rules, differences or self.differences)
        assert isinstance(saved, Saved), "an error was raised"
        shared = saved.shared
        self._inner.count()
        self.steps, self._rounds, self._dropped = shared["step"], shared["rounds"], shared["dropped_rounds"]
        self._load_outer_optimizer(shared)
        for fragment in self._fragments:
            for name, outer in fragment.outer.items():
                outer.copy_(shared["outer"][name])
        for number, part in enumerate(self._parts):
            part.load(shared["due"].get(str(number), {}))
        for number, moments in enumerate(self._moments):
            moments.load(shared["moments_due"].get(str(number), {}))

    def _load_outer_optimizer(self, shared: Mapping[str, Any]) -> None:
        """Restore the outer optimizer; one that was changed (`settings="change"`) keeps its rate and momentum."""
        groups = self._outer_optimizer.param_groups
        now = [{name: option for name, option in group.items() if name != "params"} for group in groups]
        self._outer_optimizer.load_state_dict(cloned(shared["outer_optimizer"]))
        if shared["schedule"]["outer"] == self.schedule.outer:
            return
        for group, options in zip(self._outer_optimizer.param_groups, now, strict=True):
            group.update(options)
            if not group.get("momentum"):
                for copy in group["params"]:
                    self._outer_optimizer.state.pop(copy, None)

    def close(self) -> None:
        """End all exchanges, and the thread that carries them; a later step raises `CompressorError`."""
        self._is_closed = True
        self._inner.close()
        for look in self._looks:
            look.remove()
        for moments in self._moments:
            moments.close()
        self.exchange.close()


def step_in_lockstep(workers: Sequence[DiLoCo]) -> None:
    """Take a step of workers in this process, one after another; see `DiLoCo.step`.

    Raises `SettingsError` before the first step if their schedules, or the models that they begin with, differ.
    """
    first = workers[0]
    if first.steps == 0:
        for worker in workers[1:]:
            if worker.schedule != first.schedule:
                raise SettingsError(f"step_in_lockstep: workers differ: {worker.schedule} and {first.schedule}.")
            pairs = zip(worker._fragments, first._fragments, strict=True)
            if not all(torch.equal(one.outer[name], other.outer[name]) for one, other in pairs for name in one.outer):
                raise SettingsError("step_in_lockstep: the workers' models must begin equal.")
    for worker in workers:
        worker.check_step()
    with contextlib.ExitStack() as whole:
        for worker in workers:
            whole.enter_context(worker._whole())
        for worker in workers:
            worker._begin_step()
        run_in_turns([worker._lockstep_connection() for worker in workers])
        for worker in workers:
            worker._end_step()
