"""The guard of a DistributedDataParallel: what its reducer reports, and proof of what is suspected."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from ddp_core.guard.intent import reaction_of
from ddp_core.guard.proof import AbsentError, Peers, UnansweredError
from ddp_core.guard.suspicion import Guard, Named, Step, current_pass, is_used


class WrapperGuard(Guard):
    """The guard of a DistributedDataParallel whose reducer reports what it does, as ddp_core's.

    It appends to ``log`` the parameters of gradients that it does not reduce, sets ``finished`` before it writes means
    back, and calls ``averaged`` afterwards.
    ``is_copy``: whether other ranks may have made fewer such wrappers, since a copy needs nobody else.
    """

    def __init__(self, wrapper: Any, named: Iterable[tuple[str, Tensor]], *, is_copy: bool = False) -> None:
        self.reaction = reaction_of(wrapper)  # first: it may raise, and then there is no guard
        super().__init__(named, type(wrapper.module).__name__)
        self.finished = -1  # the backward pass whose means are there
        self.reaction.has_warned = self.reaction.has_warned_of_silence = False  # by a guard before this one
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.named.values()]
        self.peers = Peers(wrapper, f"{'copy of ' if is_copy else ''}{self.title} {shapes}", lambda _: self.remove())
        self._at_last_step = 0  # of any optimizer: the number of reductions
        of_wrappers[wrapper] = self
        _refresh()

    def remove(self) -> None:
        """Judge no step any more."""
        super().remove()
        _refresh()

    @property
    def wrapper(self) -> Any:
        """The DistributedDataParallel; None once it is gone."""
        return self.peers.wrapper()

    def averaged(self, skipped: Sequence[Tensor] = ()) -> None:
        """Note that all that ``p.grad`` holds is averaged, including what had accumulated before.

        ``skipped`` are the parameters of buckets that were not reduced, since this pass did not use them.
        """
        if skipped:
            self.log.drop(self.named.keys() - set(map(id, skipped)))
        else:
            self.log.clear()
        self._ended_reductions += 1
        self.finished = current_pass()
        for other in list(of_wrappers.values()):  # they may share parameters
            if other is not self and other.log:
                other.log.drop(self.named.keys())

    # ---------------------------------------------------------------- suspicion and proof

    def who(self) -> str:
        """Return this process's rank in words, and its rank in the wrapper's group if that is another."""
        return self.peers.who()

    def compares(self) -> bool:
        """Return True if suspect gradients are compared with those of other ranks."""
        return self.reaction.mode != "off" and self.wrapper.process_group.size() > 1

    def judge(self, step: Step) -> None:
        """Raise or warn if a step is on local gradients."""
        if self.compares() or self.watches(step.optimizer):
            self.suspect(step, within=step.backward_pass not in (-1, self.finished))
        self._at_last_step = self.reductions

    def require_finished(self) -> None:
        """Raise the reducer's own error if a reduction began and has not ended."""
        self.wrapper.reducer.require_finished()

    def accuse(self, step: Step, suspects: Named, within: bool = False) -> None:
        """Ask for proof, unless the step changes no suspect parameter, or no other rank is left to differ from."""
        if self.peers.are_there():
            super().accuse(step, suspects, within)

    def prove(self, step: Step, suspects: Named, within: bool) -> None:
        """Compare suspect gradients with those of the other ranks, and raise or warn if they differ.

        Gradients that were the same are compared again at twice as many suspicions of the same optimizer.
        """
        known = id(suspects[0][1]) in self.named
        if known and not within:
            self.require_finished()
        if self.watches(step.optimizer):
            super().prove(step, suspects, within)
        raises = self.reaction.mode == "raise" and self.wrapper.require_backward_grad_sync
        if self.reaction.has_warned and not raises:
            return
        record = self.record(step.optimizer)
        record.suspicions += 1
        if record.suspicions < record.next_proof:
            return
        suspects = [(name, p) for name, p in suspects if is_used(p)]
        names = [name for name, _ in suspects]
        says = functools.partial(self.text, step, self.cause(known, within))
        compared = dict([*self.named.values(), *suspects])
        try:
            differing = self.peers.compare(compared, {id(p) for _, p in suspects}, step.holds(), says(names))
        except AbsentError as error:
            self.reaction.tell(f"{says(names)} Gradients could not be compared: {error}.", raises=raises)
        except UnansweredError as error:
            self.reaction.tell_of_silence(f"{says(names)} This could not be proved: {error}.")
        else:
            if differing is None:
                record.next_proof = 2 * record.suspicions
            else:
                self.reaction.tell(says(differing or names), raises=raises)

    def cause(self, known: bool, within: bool) -> str:
        """Return the likely cause of a step on local gradients, and a remedy."""
        if not known:
            return (
                "it was frozen when the model was wrapped, or added or replaced afterwards; wrap the model again "
                "(adapters trained in turn: while all require a gradient, with find_unused_parameters=True)"
            )
        if within:
            return "the optimizer steps in a gradient's hook, before the mean is there; step after the backward pass"
        if not self.wrapper.require_backward_grad_sync:
            return "the last backward pass before the step ran inside no_sync()"
        if not self.wrapper.require_forward_param_sync:  # set by any forward pass, with or without a backward pass
            return (
                "the last pass through the wrapper ran inside no_sync(), or inside no_grad() before the module in the "
                "wrapper was called"
            )
        if self.reductions > self._at_last_step:
            return (
                "a backward pass that was averaged was followed by one that was not; call the wrapper once for each "
                "backward pass, and never the module inside it"
            )
        return "the module inside the wrapper was called; call the wrapper"


of_wrappers: weakref.WeakKeyDictionary[Module, WrapperGuard] = weakref.WeakKeyDictionary()
"""All guards of wrappers, in the order of wrapping, which is the same on all ranks."""
guarded_parameters: set[int] = set()
"""The ids of all parameters in wrappers with a guard."""


def _refresh() -> None:
    guarded_parameters.clear()
    for guard in of_wrappers.values():
        guarded_parameters.update(guard.named)
