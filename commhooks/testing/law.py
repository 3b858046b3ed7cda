"""A law: a rule, and a function that tries it on a compressor."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

from commhooks.language.compressor import Compressor
from commhooks.testing.claims import Claims

Try = Callable[[Compressor, Claims], None]
"""A function that tries a law on a compressor, and raises `BrokenLawError` if the law does not hold."""
Excuse = Callable[[Compressor, Claims], str]
"""A function that returns why a law does not apply to a compressor; "" if it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """One rule that every compressor obeys, unless its claims say that it does not apply."""

    key: str
    """Its name, as in `Compressor.exempt`."""
    rule: str
    """The rule in a sentence."""
    causes: str
    """The usual causes if it is broken."""
    try_on: Try
    excuse: Excuse

    def __str__(self) -> str:
        return self.key

    def why_not(self, compressor: Compressor, claims: Claims) -> str:
        """Return why the law does not apply to a compressor with these claims; "" if it does."""
        return claims.exempt.get(self.key, "") or self.excuse(compressor, claims)


def law(key: str, *, causes: str, excuse: Excuse = lambda compressor, claims: "") -> Callable[[Try], Law]:
    """Make a law of the function below, whose docstring begins with the rule."""

    def made(function: Try) -> Law:
        rule = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].replace("\n", " ").removesuffix(".")
        return Law(key=key, rule=rule, causes=causes, try_on=function, excuse=excuse)

    return made


def idle(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor that exchanges nothing."""
    return "" if claims.exchanges else "it exchanges nothing, so every rank keeps its own gradient"


def keeping_nothing(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor that keeps no residual."""
    return "" if claims.error_feedback else "it keeps no residual; wrap it in ErrorFeedback to try this law"


def not_conserving(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor that keeps no residual, or whose residual is not what it has not sent."""
    return keeping_nothing(compressor, claims) or claims.drops


def sharing(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor whose mean of a parameter depends on the others in its bucket, or that exchanges nothing."""
    reason = claims.exempt.get("buckets", "its mean depends on which parameters share a bucket")
    return reason if claims.depends_on_buckets else idle(compressor, claims)
