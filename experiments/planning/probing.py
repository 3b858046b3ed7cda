"""`commhooks probe`: the time of every collective between the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from commhooks.communicators.collective import ring_bytes
from commhooks.units import counted

from ..devices import own_device
from ..launch import Send, WorldError
from ..links.link import LinkSettings, format_rate
from ..predicting import Profile
from ..predicting.errors import ProbeError
from ..predicting.ladder import LEAST_SECONDS, MOST_SECONDS
from ..predicting.link import plain_kind
from ..predicting.probes import MOST_DISAGREEMENT, Cost, Probe
from ..predicting.probing import probe
from ..report.table import plain_table
from ..report.words import percent
from .worlds import around, run_over

_SILENCE = 60.0  # seconds
_MEBI = 2**20


@dataclass(frozen=True)
class Asked:
    """The settings of a probe."""

    link: LinkSettings
    seconds: float
    ranks_per_host: int | None = None
    unsteady: bool = False  # report the probe even if its halves disagree by more than 30 %
    device: str = "cpu"
    profile: Profile | None = None  # measure only the messages of its hooks


@dataclass(frozen=True)
class Refused:
    """The message that there is no probe."""

    why: str


def check_probe(ranks: int, seconds: float) -> None:
    """Raise ValueError if there are fewer than two ranks, or a probe cannot take this many seconds."""
    if ranks < 2:
        raise ValueError(f"a link is measured between two ranks or more (got {ranks}): give --ranks 2")
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ValueError(f"a probe takes {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds (got {seconds:g})")


def measure_probe(asked: Asked, ranks: int) -> Probe | None:
    """Return the probe on the process that reports: this one, or torchrun's rank 0; None on torchrun's others.

    Raises:
        WorldError: A rank failed, or the link could not be measured; the message says why.

    """
    found: list[Probe] = []

    def hear(message: object) -> None:
        if isinstance(message, Refused):
            raise WorldError(f"error: {message.why}")
        assert isinstance(message, Probe), "rank 0 sends nothing else"
        found.append(message)

    timeout = _SILENCE + asked.seconds
    run_over(asked.link, probe_on_rank, ranks, asked, hear, timeout=timeout, device=asked.device)
    return found[0] if found else None


def probe_on_rank(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    """Probe the link; rank 0 sends the result, or the reason why there is none."""
    found: Probe | Refused
    try:
        found = probe_link(asked)
    except ProbeError as error:  # the same on all ranks
        found = Refused(str(error))
    if rank == 0:
        send(found)


def probe_link(asked: Asked) -> Probe:
    """Return the probe of the real or emulated link; all ranks must call it."""
    return probe(
        seconds=asked.seconds,
        # A rank stands for a host, unless it is said otherwise or torchrun knows.
        ranks_per_host=asked.ranks_per_host or (None if asked.link.kind == "real" else 1),
        wrap_communicator=around(asked.link),
        link=asked.link.label,
        device=own_device(asked.device),
        unsteady=asked.unsteady,
        profile=asked.profile,
    )


def probe_tables(found: Probe) -> list[Table]:
    """Return a table of all ranks' collectives, and two of those inside and between machines if they were measured."""
    title = f"{counted(found.ranks, 'rank')}, link {found.link or 'real'}, {found.backend}, {found.took:.1f} s"
    if found.disagreement > MOST_DISAGREEMENT:
        title += f"; unsteady: halves disagree by up to {percent(found.disagreement)}"
    tables = [_table(title, found)]
    if found.inner is not None and found.outer is not None:
        tables.append(_table(f"inside machines of {counted(found.inner.ranks, 'rank')}", found.inner))
        tables.append(_table(f"between {found.outer.ranks} machines, at all positions at once", found.outer))
    return tables


def _table(title: str, level: Probe) -> Table:
    columns = ("latency", "rate", "largest sent", "took", "processor", "residual", "used")
    table = plain_table(title, columns, first="collective")
    for kind, cost in level.costs.items():
        table.add_row(escape(kind), *_row(kind, cost, level.ranks))
    return table


def _row(kind: str, cost: Cost, ranks: int) -> list[str]:
    line, processor = cost.line, cost.processor_line
    bits = 8 * ring_bytes(plain_kind(kind), _MEBI, ranks) / _MEBI  # sent for each byte of payload
    return [
        f"{1e6 * line.at_zero:,.0f} µs",
        format_rate(float(f"{bits / line.per_byte:.3g}") if line.per_byte else None),
        f"{cost.largest / 1024:,.3g} KiB" if cost.largest < _MEBI else f"{cost.largest / _MEBI:.3g} MiB",
        f"{1e3 * cost.timings[-1].seconds.median:.3g} ms",
        f"{1e6 * processor.at_zero:,.0f} µs + {1e9 * processor.per_byte:.2g} ns/B",
        percent(cost.residual),
        "line" if cost.is_line else "sizes",
    ]
