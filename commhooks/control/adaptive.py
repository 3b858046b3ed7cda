"""A controller between steps: `Adaptive` moves an attachment to the candidate that suits the link.

Compressors know no clock, and must not: what a step sends is a function of gradients, state and step. So the clock is
here, between steps, on the training thread. After each step the ranks exchange one small tensor: how long the step took
and how long it waited. If waiting has changed, they time two all-reduces, and decide (`Decider`) from numbers that are
the same on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from commhooks.communicators.beginning import agree
from commhooks.compressors.noop import NoOp
from commhooks.control.decider import AdaptiveRule, Decider
from commhooks.control.link import Link
from commhooks.control.meter import Meter
from commhooks.control.state import read
from commhooks.errors import AttachError, CheckpointError, CommHooksError, SettingsError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.language.compressor import Compressor


@dataclasses.dataclass(frozen=True)
class Decision:
    """A move from one compressor to another, the same on every rank."""

    step: int
    """The first step with the new compressor."""
    source: str
    target: str
    reason: str

    def __str__(self) -> str:
        """Return the decision in a line."""
        return f"step {self.step}: {self.source} -> {self.target}; {self.reason}"


@dataclasses.dataclass(frozen=True)
class SavedController:
    """The layout of a controller's state."""

    candidates: list[str]
    ranks: int
    decisions: list[Decision]
    decider: Decider


class Adaptive:
    """Moves an attachment among candidate compressors, to the one whose step takes least on today's link."""

    def __init__(
        self,
        attachment: Handle[Channel],
        candidates: Sequence[Compressor | str],
        *,
        rule: AdaptiveRule | None = None,
        on_decision: Callable[[Decision], object] | None = None,
    ) -> None:
        """Check the candidates; every rank must do so between the same two steps.

        - `attachment` is what `attach` returned; its compressor must be one of the candidates.
        - `candidates`: at least two compressors, or names for `make_compressor`, such as
          "powersgd:rank=4". They are tried in this order at first; of those that are about equally fast, the first is
          used.
        - `rule`: when to look, and when to move.
        - `on_decision` is called with each decision, on every rank.

        Raises `SettingsError` for candidates that cannot work, and `AttachError` if ranks disagree or another rank's
        cannot work. The attachment stays as it is.
        """
        self._attachment = attachment
        self._on_decision = on_decision
        self._meter = Meter(attachment)
        self._rule = rule or AdaptiveRule()
        told: str | CommHooksError
        try:
            self._candidates = _checked(attachment, candidates)
            candidate = _in_use(attachment, self._candidates)
            told = f"candidates: {self._candidates}\nrule: {self._rule}\ncompressor in use: {attachment.compressor}"
        except (SettingsError, AttachError) as error:
            told = error
        agree("Adaptive", self._meter.group, told, AttachError)
        attachment.expect(*self._candidates)  # a checkpoint may hold the state of every candidate
        self._decider = self._new_decider(candidate)
        self.decisions: list[Decision] = []

    @property
    def compressor(self) -> Compressor:
        """The candidate in use."""
        return self._candidates[self._decider.candidate]

    @property
    def candidates(self) -> tuple[Compressor, ...]:
        """The candidates."""
        return self._candidates

    @property
    def link(self) -> Link | None:
        """The link's effective rate and latency between ranks when it was last probed; None before the first probe."""
        return self._decider.link

    def step(self) -> Decision | None:
        """Look at the steps since the last call, and return the move that is made now, if any.

        Call it on every rank after the optimizer's step. If no step was synchronised since the last call (gradients are
        being accumulated), it does nothing. If somebody else replaced the attachment's compressor, it goes on from that
        one. Raises `CollectiveError`, which names the ranks, if a rank is gone or does not come within the attachment's
        `hook_timeout` (on NCCL, the group's own error after its timeout), what `Handle.replace` raises, and
        `SettingsError` if the compressor in use is no candidate.
        """
        if self._attachment.compressor != self.compressor:
            self._decider.follow(_in_use(self._attachment, self._candidates))
            self._meter.start()
            return None
        step = self._meter.step_times()
        if step is None or not self._decider.take(step):
            return None
        source, move = self.compressor, self._decider.decide(self._meter.probe(self.link, step.seconds))
        self._meter.start()
        if move is None:
            return None
        self._attachment.replace(self.compressor)
        decision = Decision(self._attachment.steps, str(source), str(self.compressor), move[1])
        self.decisions.append(decision)
        if self._on_decision is not None:
            self._on_decision(decision)
        self._meter.start()
        return decision

    def pause(self) -> None:
        """Leave out what has passed since the last call of `step`: an evaluation, a checkpoint, a restart."""
        self._meter.start()

    def state_dict(self) -> dict[str, Any]:
        """Return the candidate in use, each one's last step, and the decisions: plain data, the same on all ranks."""
        candidates = list(map(str, self._candidates))
        return dataclasses.asdict(SavedController(candidates, self._meter.ranks, self.decisions, self._decider))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the run that returned this; the attachment's compressor is replaced if another was in use.

        Call it on every rank, before the attachment's own `load_state_dict`, which needs the compressor that was saved.
        With a different number of ranks it begins with the saved candidate, and measures all of them again. Raises
        `CheckpointError` on every rank, and changes nothing, if a rank's candidates or rule differ, if the state is
        damaged or has another version's layout (the error names the entry), or if ranks pass different states.
        """
        told: str | CommHooksError
        try:
            saved = self._read(state)
            told = f"state: {saved}"
        except CheckpointError as error:
            told = error
        agree("Adaptive", self._meter.group, told, CheckpointError)
        decider = saved.decider
        if saved.ranks != self._meter.ranks:  # what was measured holds for that many
            decider = self._new_decider(decider.candidate)
        if self._candidates[decider.candidate] != self._attachment.compressor:
            self._attachment.replace(self._candidates[decider.candidate])
        self._decider, self.decisions = decider, saved.decisions
        self.pause()

    def _read(self, state: dict[str, Any]) -> SavedController:
        """Return what a state says; raise `CheckpointError` if it is another controller's, or damaged."""
        saved: SavedController = read(SavedController, state, "state")
        candidates, decider = list(map(str, self._candidates)), saved.decider
        compared = {
            "candidates": (saved.candidates, candidates),
            "rule": (decider.rule, self._rule),
            "number of samples": (len(decider.samples), len(candidates)),
        }
        faults = [f"{what}: saved {then!r}, now {now!r}" for what, (then, now) in compared.items() if then != now]
        if faults:
            raise CheckpointError(f"Adaptive: the state does not match. {'; '.join(faults)}.")
        return saved

    def metrics(self) -> dict[str, float]:
        """Return the candidate (from 0), the number of moves, and the link's rate in bit/s and latency in seconds."""
        found = {"commhooks/adaptive/candidate": float(self._decider.candidate)}
        found["commhooks/adaptive/moves"] = float(len(self.decisions))
        if self.link is not None:
            found["commhooks/adaptive/link_rate"] = self.link.rate
            found["commhooks/adaptive/link_latency"] = self.link.latency
        return found

    def _new_decider(self, candidate: int) -> Decider:
        return Decider(self._rule, candidate, [None] * len(self._candidates))


def _checked(attachment: Handle[Channel], candidates: Sequence[Compressor | str]) -> tuple[Compressor, ...]:
    if isinstance(candidates, (str, Compressor)) or len(candidates) < 2:
        raise SettingsError(f"Adaptive(candidates={candidates!r}): candidates must be at least two compressors.")
    checked = tuple(attachment.checked(candidate) for candidate in candidates)
    twice = [str(candidate) for number, candidate in enumerate(checked) if candidate in checked[:number]]
    if twice:
        raise SettingsError(f"Adaptive: each candidate must differ from the others ({twice[0]} is there twice).")
    if any(isinstance(candidate, NoOp) for candidate in checked):
        raise SettingsError("Adaptive: noop averages nothing, so the replicas would drift apart; it is no candidate.")
    return checked


def _in_use(attachment: Handle[Channel], candidates: Sequence[Compressor]) -> int:
    if attachment.compressor not in candidates:
        raise SettingsError(
            f"Adaptive: the compressor in use, {attachment.compressor}, must be one of the candidates "
            f"({', '.join(map(str, candidates))})."
        )
    return candidates.index(attachment.compressor)
