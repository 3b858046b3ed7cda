"""A controller between steps: `Adaptive` moves an attachment along a ladder of compressors as the link changes.

Compressors know no clock, and must not: what a step sends is a function of gradients, state and step. So the clock is
here, between steps, on the training thread. After each step the ranks exchange one small tensor: how long the step took
and how long it waited. If waiting has changed, they time two all-reduces, and decide (`Decider`) from numbers that are
the same on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from commhooks.communicators.links import Link
from commhooks.compressors.noop import NoOp
from commhooks.control.deciding import Decider
from commhooks.control.link_meter import Counting, LinkMeter
from commhooks.control.rule import AdaptiveRule, FullRule
from commhooks.errors import AttachError, CheckpointError, CommHooksError, SettingsError
from commhooks.language.compressor import Compressor

Value = TypeVar("Value")


class Replaceable(Counting, Protocol):
    """The part of an `Attachment` that the controller uses."""

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        ...

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        ...

    def checked(self, compressor: Compressor | str) -> Compressor:
        """Return the compressor, made if a name is given; raise if it could not take over."""
        ...

    def expect(self, *compressors: Compressor) -> None:
        """Announce the compressors that may take over later."""
        ...

    def replace(self, compressor: Compressor | str) -> None:
        """Switch to another compressor from the next step on."""
        ...


@dataclasses.dataclass(frozen=True)
class Decision:
    """A move from one compressor to another, the same on every rank."""

    step: int
    """The first step with the new compressor."""
    source: str
    target: str
    reason: str

    def is_sound(self) -> bool:
        """Return whether it has a step and three texts: one that was loaded may have anything."""
        texts = (self.source, self.target, self.reason)
        return type(self.step) is int and self.step >= 0 and all(type(text) is str for text in texts)

    def __str__(self) -> str:
        """Return the decision in a line."""
        return f"step {self.step}: {self.source} -> {self.target}; {self.reason}"


class Adaptive:
    """Moves an attachment along a ladder of compressors, to the one with which a step takes least on today's link."""

    def __init__(
        self,
        attachment: Replaceable,
        ladder: Sequence[Compressor | str],
        *,
        rule: AdaptiveRule | None = None,
        on_decision: Callable[[Decision], object] | None = None,
    ) -> None:
        """Check the ladder; every rank must do so between the same two steps.

        - `attachment` is what `attach` returned; its compressor must be one of the rungs.
        - `ladder`: compressors, or names for `make_compressor`, such as "powersgd:rank=4"; at least two. They are tried
          in this order at first; otherwise the order does not matter.
        - `rule`: when to look, and when to move.
        - `on_decision` is called with each decision, on every rank.

        Raises `SettingsError` for a ladder that cannot work, on every rank if it is one rank's, and `AttachError` if
        ranks disagree. The attachment stays as it is.
        """
        self._attachment = attachment
        full_rule = FullRule.of(rule or AdaptiveRule())
        self._on_decision = on_decision
        self._meter = LinkMeter(attachment)
        self._ladder, rung = self._agreed(ladder, full_rule)
        attachment.expect(*self._ladder)  # a checkpoint may hold state of every rung
        self._decider = Decider(len(self._ladder), self._meter.ranks, rung, full_rule)
        self.decisions: list[Decision] = []

    @property
    def compressor(self) -> Compressor:
        """The compressor of the rung in use."""
        return self._ladder[self._decider.rung]

    @property
    def ladder(self) -> tuple[Compressor, ...]:
        """The compressors."""
        return self._ladder

    @property
    def link(self) -> Link | None:
        """The link's effective rate and latency between ranks when it was last probed; None before the first probe."""
        return self._decider.link

    def step(self) -> Decision | None:
        """Look at the steps since the last call, and return the move that is made now, if any.

        Call it on every rank after the optimizer's step. If no step was synchronised since the last call (gradients are
        being accumulated), it does nothing. If somebody else replaced the attachment's compressor, it goes on from that
        one. Raises the group's own error if a rank is gone, `CollectiveError` if a rank does not come within the
        attachment's `hook_timeout`, what `Attachment.replace` raises, and `SettingsError` if the compressor in use is
        not a rung.
        """
        if self._attachment.compressor != self.compressor:
            self._decider.follow(_rung_in_use(self._attachment, self._ladder))
            self._meter.start()
            return None
        seen = self._meter.seen()
        if seen is None or not self._decider.take(seen):
            return None
        move = self._decider.decide(self._meter.probe(self._decider))
        self._meter.start()
        if move is None:
            return None
        self._attachment.replace(self._ladder[move.target])
        names = str(self._ladder[move.source]), str(self._ladder[move.target])
        decision = Decision(self._attachment.steps, *names, move.reason)
        self.decisions.append(decision)
        if self._on_decision is not None:
            self._on_decision(decision)
        self._meter.start()
        return decision

    def pause(self) -> None:
        """Leave out what has passed since the last call of `step`: an evaluation, a checkpoint, a restart."""
        self._meter.start()

    def state_dict(self) -> dict[str, Any]:
        """Return the rung in use, all rungs' measurements, and the decisions, as plain data, the same on all ranks."""
        return {
            "ladder": list(map(str, self._ladder)),
            "rule": dataclasses.asdict(self._decider.rule),
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
            "ranks": self._meter.ranks,
            "decider": self._decider.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the run that returned this; the attachment's compressor is replaced if another was in use.

        Call it on every rank, before the attachment's own `load_state_dict`, which needs the compressor that was saved.
        With a different number of ranks it begins on the saved rung, and measures all rungs again. Settings that rules
        no longer have stay as they were saved. Raises `CheckpointError` on every rank, and changes nothing, if a rank's
        ladder or rule differs, if the state is damaged (the error names the entry), or if ranks pass different states.
        """
        decider, decisions = self._alike(
            lambda: self._read(state),
            lambda read: f"{read[0].rule} {read[0].state_dict()} {read[1]}",
            CheckpointError,
            "ranks pass different states",
        )
        if self._ladder[decider.rung] != self._attachment.compressor:
            self._attachment.replace(self._ladder[decider.rung])
        self._decider, self.decisions = decider, decisions
        self.pause()

    def _read(self, state: dict[str, Any]) -> tuple[Decider, list[Decision]]:
        """Return what a state says; raise `CheckpointError` if it is another controller's, or damaged."""
        try:
            ladder = state["ladder"]
            rule = FullRule(**state["rule"])
            compared = {
                "ladder": (ladder, list(map(str, self._ladder))),
                "rule": (_settings_of(rule), _settings_of(self._decider.rule)),
            }
            differing = [
                f"{what}: saved {saved!r}, now {mine!r}" for what, (saved, mine) in compared.items() if saved != mine
            ]
            decisions = [Decision(**each) for each in state["decisions"]]
            saved, ranks = state["decider"], state.get("ranks", self._meter.ranks)
            wrong = [f"decisions[{number}]: {each!r}" for number, each in enumerate(decisions) if not each.is_sound()]
            wrong += [f"ranks: {ranks!r}"] if type(ranks) is not int or ranks < 2 else []
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"Adaptive: the state is damaged ({type(error).__name__}: {error}).") from error
        if differing:
            raise CheckpointError(f"Adaptive: the state does not match. {'; '.join(differing)}.")
        if wrong:
            raise CheckpointError(f"Adaptive: the state is damaged. {'; '.join(wrong)}.")
        decider = Decider(len(self._ladder), self._meter.ranks, self._decider.rung, rule)
        decider.load_state_dict(saved)
        if ranks != self._meter.ranks:  # what was measured holds for that many
            decider = Decider(len(self._ladder), self._meter.ranks, decider.rung, rule)
        return decider, decisions

    def metrics(self) -> dict[str, float]:
        """Return the rung (from 0), the number of moves, and the link's rate in bit/s and latency in seconds."""
        found = {"commhooks/adaptive/rung": float(self._decider.rung)}
        found["commhooks/adaptive/moves"] = float(len(self.decisions))
        if self.link is not None:
            found["commhooks/adaptive/link_rate"] = self.link.rate
            found["commhooks/adaptive/link_latency"] = self.link.latency
        return found

    def _agreed(self, ladder: Sequence[Compressor | str], rule: FullRule) -> tuple[tuple[Compressor, ...], int]:
        """Return the rungs and the one in use, once every rank has the same."""
        return self._alike(
            lambda: _checked(self._attachment, ladder),
            lambda found: f"{found} {rule}",
            AttachError,
            "ranks disagree about ladder, rule or the compressor in use",
        )

    def _alike(
        self, make: Callable[[], Value], told: Callable[[Value], str], error: type[CommHooksError], complaint: str
    ) -> Value:
        """Return what `make` returns, once every rank has the same; raise on all of them if any cannot make it."""
        refusal: CommHooksError | None = None
        try:
            made = make()
            text = told(made)
        except (SettingsError, AttachError, CheckpointError) as raised:
            refusal, text = raised, f"error: {raised}"
        texts = self._meter.gathered(text)
        if refusal is not None:
            raise refusal
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text.startswith("error: ")]
        if failed:
            raise (SettingsError if error is AttachError else error)(f"Adaptive: {' '.join(failed)}")
        if len(set(texts)) > 1:
            raise error(f"Adaptive: {complaint}; by rank: " + "; ".join(texts))
        return made


def _settings_of(rule: AdaptiveRule) -> AdaptiveRule:
    """Return only what users set."""
    return AdaptiveRule(margin=rule.margin, look=rule.look)


def _checked(attachment: Replaceable, ladder: Sequence[Compressor | str]) -> tuple[tuple[Compressor, ...], int]:
    if isinstance(ladder, (str, Compressor)) or len(ladder) < 2:
        raise SettingsError(f"Adaptive(ladder={ladder!r}): ladder must have at least two compressors to choose from.")
    rungs = tuple(attachment.checked(rung) for rung in ladder)
    twice = [str(rung) for number, rung in enumerate(rungs) if rung in rungs[:number]]
    if twice:
        raise SettingsError(f"Adaptive: each rung must differ from the others ({twice[0]} is there twice).")
    if any(isinstance(rung, NoOp) for rung in rungs):
        raise SettingsError("Adaptive: noop averages nothing, so the replicas would drift apart; it cannot be a rung.")
    return rungs, _rung_in_use(attachment, rungs)


def _rung_in_use(attachment: Replaceable, rungs: Sequence[Compressor]) -> int:
    if attachment.compressor not in rungs:
        raise SettingsError(
            f"Adaptive: the compressor in use, {attachment.compressor}, must be a rung of the ladder "
            f"({', '.join(map(str, rungs))})."
        )
    return rungs.index(attachment.compressor)
