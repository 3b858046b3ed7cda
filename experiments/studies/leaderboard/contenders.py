"""The leaderboard's contenders: every registered compressor at its usual settings, with and without feedback."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from commhooks import Compressor, ErrorFeedback
from commhooks.compressors import COMPRESSORS
from commhooks.errors import CommHooksError
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask
from commhooks.units import unknown

DENSE = "all-reduce"
"""The baseline for all others."""

USUAL: Mapping[str, tuple[str, ...]] = {
    "dgc": ("dgc:ratio=0.01",),
    "powersgd": ("powersgd:rank=1", "powersgd:rank=4"),
    "random-k": ("random-k:ratio=0.01", "random-k:ratio=0.1"),
    "threshold": ("threshold:threshold=0.001,capacity=0.1",),
    "top-k": ("top-k:ratio=0.01", "top-k:ratio=0.1"),
}
"""Settings reported in papers, by name; any other name runs once, with its defaults."""

SKIPPED: Mapping[str, str] = {"noop": "it exchanges nothing, so there is no common model to judge"}
"""Names that cannot take part, and the reasons."""


@dataclass(frozen=True)
class Contender:
    """A compressor at one setting, with or without error feedback."""

    spec: Spec
    feedback: bool

    @property
    def label(self) -> str:
        """Its settings, and '+ EF' if it has error feedback."""
        return f"{self.spec.label} + EF" if self.feedback else self.spec.label

    def make(self, seed: int = 0) -> Compressor:
        """Return a new compressor; raise ValueError if there is none of this name and these settings."""
        settings = (*self.spec.settings, ("error_feedback", self.feedback))
        return make_hook(Spec(self.spec.name, settings), seed)


@dataclass(frozen=True)
class LeftOut:
    """A contender that does not take part, and the reason."""

    label: str
    reason: str


def known_names(names: Iterable[str], known: Collection[str], what: str) -> list[str]:
    """Return the names; raise ValueError if one is unknown (and suggest the nearest) or occurs twice."""
    found = list(names)
    for name in found:
        if name not in known:
            raise ValueError(unknown(what, name, known))
        if found.count(name) > 1:
            raise ValueError(f"{what} {name!r} is asked for twice")
    return found


def contenders(names: Iterable[str] | None, task: LoadedTask) -> tuple[list[Contender], list[LeftOut]]:
    """Return all forms of the named compressors that can train the task, dense first, and the ones that cannot.

    Args:
        names: Names of compressors, with settings or without, for the usual ones; None: all registered names.
        task: The task whose model's parameters they must accept.

    Raises:
        ValueError: A name is not registered, or is given twice.

    """
    chosen = sorted(COMPRESSORS) if names is None else list(names)
    specs = [Spec.parse(text) for name in chosen for text in USUAL.get(name, (name,))]
    for spec in specs:
        known_names([spec.name], COMPRESSORS, "compressor")
        if specs.count(spec) > 1:
            raise ValueError(f"compressor {spec.label!r} is asked for twice")
    forms, left_out = [Contender(Spec(DENSE), feedback=False)], list[LeftOut]()
    for spec in (spec for spec in specs if spec.name != DENSE):
        if spec.name in SKIPPED:
            left_out.append(LeftOut(spec.label, SKIPPED[spec.name]))
            continue
        found, refused = _forms(spec, task)
        forms += found
        left_out += refused
    return forms, left_out


def _forms(spec: Spec, task: LoadedTask) -> tuple[list[Contender], list[LeftOut]]:
    """Return a compressor without and with error feedback, if the two differ, and reasons for rejected ones."""
    parameters = {name: parameter.detach() for name, parameter in task.model.named_parameters()}
    found, refused = list[Contender](), list[LeftOut]()
    for contender in (Contender(spec, feedback=False), Contender(spec, feedback=True)):
        try:
            compressor = contender.make()
            compressor.check(parameters, None)
        except (CommHooksError, ValueError) as error:
            refused.append(LeftOut(contender.label, str(error)))
            continue
        inner = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
        if not contender.feedback or any(inner.loss(*one) for one in parameters.items()):
            found.append(contender)
    return found, refused
