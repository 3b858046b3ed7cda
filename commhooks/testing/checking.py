"""All laws on one compressor: what is kept, what is broken and by what, and what does not apply."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from commhooks.compressors import TwoHop
from commhooks.compressors.codecs import Codec
from commhooks.errors import CollectiveError, SettingsError
from commhooks.language import lending
from commhooks.language.compressor import Compressor, check_compressor, loss_of_a_matrix, takes_feedback
from commhooks.testing.claims import SHAPES, Claims, every_one_in
from commhooks.testing.conservation import LAWS as OF_FEEDBACK
from commhooks.testing.exchange import LAWS as OF_EXCHANGE
from commhooks.testing.law import Law, law
from commhooks.testing.losses import LAWS as OF_LOSSES
from commhooks.testing.state import LAWS as OF_STATE
from commhooks.testing.workers import BrokenLawError, Workers, normal, zeros
from commhooks.wrappers import ErrorFeedback, Hierarchical, WithoutFeedback
from commhooks.wrappers.error_feedback import with_feedback

LAWS: tuple[Law, ...] = (*OF_EXCHANGE, *OF_FEEDBACK, *OF_STATE, *OF_LOSSES)
"""Every law, in the order in which they are tried."""

Verdict = Literal["kept", "broken", "crashed", "does not apply"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of trying one law."""

    law: str
    """The law's key."""
    rule: str
    """The law in a sentence."""
    verdict: Verdict
    why: str = ""
    """The observation that broke it, or the reason why it does not apply."""
    causes: str = ""
    """The usual causes, if it is broken."""
    place: str = ""
    """The file, line and code that raised an error, if it crashed."""
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        """True if the law is broken, or trying it crashed."""
        return self.verdict in ("broken", "crashed")

    def __str__(self) -> str:
        if self.verdict == "kept":
            return f"kept: {self.rule}"
        if self.verdict == "does not apply":
            return f"does not apply: {self.rule}, because {self.why}"
        end = f"usual causes: {self.causes}" if self.verdict == "broken" else f"at {self.place}"
        return f"{self.verdict}: {self.rule}; {self.why}; {end}"


@law(
    "steps",
    causes="a request that depends on `context.rank`, or a shape that depends on the rank or on the gradients, such as "
    "the number of elements above a threshold",
)
def steps(compressor: Compressor, claims: Claims) -> None:
    """A step can be made, with two ranks and one, and with each parameter alone."""
    for world_size, shapes in ((2, SHAPES[0]), (1, SHAPES[0]), *((2, shape) for shape in SHAPES)):
        workers = Workers(compressor, world_size, zeros(shapes))
        workers.step(normal(workers.parameters, world_size, seed=0))


def as_used(given: Compressor | Codec) -> Compressor:
    """Return the compressor to check: a codec inside `TwoHop`, and `ErrorFeedback` around a loss that it can feed back.

    A compressor is returned as it is if there is `ErrorFeedback` or `WithoutFeedback` in it, if it is unbiased, or if
    its error is not below 1.
    """
    compressor = with_feedback(TwoHop(codec=given) if isinstance(given, Codec) else given)
    loss = loss_of_a_matrix(compressor)
    if isinstance(compressor, TwoHop) and loss.contraction >= 1 and compressor.damping is None:
        return dataclasses.replace(compressor, server_feedback=False)
    is_fed = any(isinstance(one, ErrorFeedback | WithoutFeedback | Hierarchical) for one in every_one_in(compressor))
    keeps = loss.is_worth_keeping and not loss.unbiased and loss.contraction < 1 and takes_feedback(compressor)
    return ErrorFeedback(inner=compressor) if keeps and not is_fed else compressor


def check(compressor: Compressor | Codec, *, only: Sequence[str] = ()) -> list[Finding]:
    """Try every law on a compressor, on workers in this process, and return a finding for each law.

    A law does not apply if the compressor does not claim its subject, or names the law in `exempt`. It takes 5 to 30 s
    on one core; more for large blocks, or an error near 1.

    Args:
        compressor: The compressor, with its settings. A codec is put into `TwoHop`, and a compressor that calls `keep`
            into `ErrorFeedback`.
        only: The keys of the laws to try; none: all.

    Raises:
        SettingsError: This is no compressor, or there is no law of such a name.

    """
    return list(findings(compressor, only=only))


def findings(compressor: Compressor | Codec, *, only: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings of `check` one after another."""
    compressor = TwoHop(codec=compressor) if isinstance(compressor, Codec) else compressor
    check_compressor("check", compressor)
    known = [each.key for each in LAWS]
    if unknown := sorted({*only} - {*known}):
        raise SettingsError(f"check(only={unknown!r}): there is no such law; there are {', '.join(known)}.")
    compressor = as_used(compressor)
    with _strict():
        first = _tried(steps, compressor, Claims())
        if first.is_bad:  # nothing else can be said
            yield first
            return
        claims = Claims.of(compressor)
        for each in LAWS:
            if not only or each.key in only:
                yield _tried(each, compressor, claims)


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    """Let tiles that are used out of order raise, and leave torch's settings as they were."""
    checked, threads = lending.IS_CHECKED, torch.get_num_threads()
    lending.IS_CHECKED = True
    torch.set_num_threads(1)  # tensors are small, and sums of several threads may differ
    try:
        yield
    finally:
        lending.IS_CHECKED = checked
        torch.set_num_threads(threads)


def _tried(each: Law, compressor: Compressor, claims: Claims) -> Finding:
    began = time.perf_counter()
    verdict: Verdict = "kept"
    why = causes = at = ""
    try:
        why = each.why_not(compressor, claims)
        if why:
            verdict = "does not apply"
        else:
            each.try_on(compressor, claims)
    except BrokenLawError as error:
        verdict, why, causes = "broken", str(error), each.causes
    except Exception as error:  # whatever somebody else's code raises
        cause = _cause_of(error)
        notes = [note for one in (error, cause) for note in getattr(one, "__notes__", ())]
        verdict, at = "crashed", _place_of(cause)
        why = f"{type(cause).__name__}: {cause} {notes[0] if notes else ''}".strip()
        if isinstance(cause, CollectiveError):  # ranks that do not ask for the same
            verdict, causes = "broken", steps.causes
    seconds = time.perf_counter() - began
    return Finding(law=each.key, rule=each.rule, verdict=verdict, why=why, causes=causes, place=at, seconds=seconds)


def _cause_of(error: BaseException) -> BaseException:
    """Return the error that led to this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the author's own code that an error went through, as "file:line: code"."""
    ours = [str(Path(file).parents[depth]) for file, depth in ((__file__, 1), (torch.__file__, 0))]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(frame.filename.startswith(folder) for folder in ours)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"
