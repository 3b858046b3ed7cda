"""The hooks that a profile measures unless it is told others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.language.text import Spelling, parse
from commhooks.making import make_compressor
from commhooks.scheduling.policy import POLICIES, PolicyName
from commhooks.wrappers.error_feedback import with_feedback
from commhooks.wrappers.hierarchical import is_hierarchical

NOOP, ALL_REDUCE = "noop", "allreduce"
"""The labels of the two hooks that every profile has."""
DENSE = "all-reduce"
"""The second one's name."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A compressor and the order of its collectives."""

    hook: str
    """The hook in text form: 'powersgd:rank=4'."""
    compressor: Compressor
    policy: PolicyName = "fifo"
    label: str = ""
    """Its name in tables; empty: `hook`, followed by the policy unless that is "fifo"."""

    def __post_init__(self) -> None:
        check_compressor("Candidate", self.compressor)
        object.__setattr__(self, "compressor", with_feedback(self.compressor))
        if self.policy not in POLICIES:
            raise SettingsError(f"Candidate(policy={self.policy!r}): policy must be one of {', '.join(POLICIES)}.")
        if is_hierarchical(self.compressor):
            raise SettingsError(
                f"Candidate({self.hook!r}): a collective among some of the ranks has no place in a profile; measure "
                "the compressor inside Hierarchical."
            )
        if not self.label:
            policy = None if self.policy == "fifo" else self.policy
            object.__setattr__(self, "label", str(parse(self.hook).having(policy=policy)))


def named(name: str, *, policy: PolicyName = "fifo", label: str = "", **settings: Any) -> Candidate:
    """Return the candidate of a name that `make_compressor` knows, with its settings."""
    written = str(Spelling(name, tuple(settings.items())))
    return Candidate(written, make_compressor(written), policy, label)


def label_in_profile(hook: str) -> str:
    """Return the label under which a profile has a hook: it always has the all-reduce, under a label of its own."""
    return ALL_REDUCE if hook == DENSE else hook


def candidate_of(hook: Candidate | Compressor | str) -> Candidate:
    """Return the candidate of what a user passes as a hook: also what `attach` takes, with a policy if it is text."""
    if isinstance(hook, Candidate):
        return hook
    if isinstance(hook, str):
        spelling = parse(hook, "hook")
        plain = str(spelling.having(policy=None))
        return Candidate(plain, make_compressor(plain), dict(spelling.settings).get("policy", "fifo"))
    check_compressor("profile", hook)
    return Candidate(str(hook), hook)


def with_the_two(hooks: Iterable[Candidate | Compressor | str]) -> list[Candidate]:
    """Return noop and all-reduce, and then the others; raise `SettingsError` if one is given twice."""
    found = {one.label: one for one in (named("noop"), named(DENSE, label=ALL_REDUCE))}
    given = [candidate_of(hook) for hook in hooks]
    for one in given:
        if one.label in found and one.label not in (NOOP, ALL_REDUCE):
            raise SettingsError(f"profile: hook {one.label!r} is given twice.")
        found.setdefault(one.label, one)
    return list(found.values())


def default_candidates() -> tuple[Candidate, ...]:
    """Return the hooks that are measured by default, beside noop and all-reduce."""
    fifo = (
        named("fp16"),
        named("int8"),
        named("top-k", ratio=0.01),
        *(named("powersgd", rank=rank) for rank in (1, 2, 4)),
    )
    fused = (
        named("top-k", policy="fused", ratio=0.01),
        *(named("powersgd", policy="fused", rank=r) for r in (1, 2, 4)),
    )
    return (*fifo, *fused)
