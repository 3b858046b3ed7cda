"""The ranks of a command that measures: torchrun's, or processes of this machine with a link between them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commhooks.communicators import Communicator
from commhooks.communicators.private_group import WrapCommunicator
from commhooks.experiments.cluster import Cluster
from commhooks.experiments.devices import backend_for
from commhooks.experiments.launch import (
    RankFunction,
    Send,
    WorldError,
    check_real,
    ranks_here,
    run_in_torchrun,
    run_world,
    torchrun_world,
)
from commhooks.experiments.links.link import EmulatedLink, LinkSettings, Wire


@dataclass(frozen=True)
class Refused:
    """The message of a rank that measured nothing."""

    why: str


def check_world(ranks: int | None, link: str | None) -> tuple[int, LinkSettings]:
    """Return the number of ranks and their link: torchrun's, or the requested ones.

    Raises:
        ValueError: The number is below 1; torchrun started this process, but other ranks or hosts are requested; or the
            link's text does not parse, is the real network without torchrun, or its rate changes over time.

    """
    joined = torchrun_world()
    settings = LinkSettings.parse(("real" if joined else "unlimited") if link is None else link)
    check_real(settings)
    if joined and (settings.kind == "hosts" or ranks not in {None, joined[1]}):
        raise ValueError(
            f"under torchrun there are {joined[1]} ranks on their hosts already: leave out --ranks, and use --link "
            "real, or an emulated link"
        )
    if settings.schedule:
        raise ValueError(f"link {settings.label!r} changes over time, so no figure holds for it: name one rate")
    number = joined[1] if joined else 2 if ranks is None else ranks
    if number < 1:
        raise ValueError(f"ranks must be at least 1 (got {number})")
    return number, settings


def check_place(*files: Path | None) -> None:
    """Raise ValueError if one of the files cannot be written, before anything is measured."""
    places = [file.resolve() for file in files if file is not None]
    twice = next((file for number, file in enumerate(places) if file in places[:number]), None)
    if twice is not None:
        raise ValueError(f"{twice} is to hold two things: name another place for one of them")
    for file in filter(None, files):
        folder = file.resolve().parent
        if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"{file} cannot be written: its folder must exist and be writable; name another place")


def found_by(
    link: LinkSettings, function: RankFunction, ranks: int, argument: object, *, timeout: float, device: str = "cpu"
) -> Any:
    """Return what the ranks found, on the process that reports: this one, or torchrun's rank 0; None on others.

    Raises:
        WorldError: A rank failed or fell silent, or sent that it refused; the message says why.

    """
    found: list[Any] = []

    def hear(message: object) -> None:
        if isinstance(message, Refused):
            raise WorldError(f"error: {message.why}")
        found.append(message)

    run_over(link, function, ranks, argument, hear, timeout=timeout, device=device)
    return found[0] if found else None


def run_over(
    link: LinkSettings,
    function: RankFunction,
    ranks: int,
    argument: object,
    on_message: Send,
    *,
    timeout: float,
    device: str = "cpu",
) -> None:
    """Call the function on every rank, torchrun's or new ones; see `run_world`. If the link asks for hosts, make them.

    Ranks use the backend for training on this kind of device over the link.

    An emulated link is not added here: the function must wrap its communicators with `around(link)`.
    """
    backend = backend_for(device, link, ranks_here(ranks))
    if torchrun_world() is not None:
        run_in_torchrun(function, argument, on_message, timeout=timeout, backend=backend)
        return
    with ExitStack() as stack:
        cluster = None
        if link.kind == "hosts":
            up, down = link.bits_per_second, link.down_bits_per_second or link.bits_per_second
            cluster = stack.enter_context(Cluster.create(ranks, up=up, down=down))
        run_world(function, ranks, argument, on_message, timeout=timeout, backend=backend, cluster=cluster)


def around(link: LinkSettings) -> WrapCommunicator | None:
    """Return a function that wraps a communicator in the emulated link; None if the link needs no emulation.

    All communicators that it wraps on a rank share one link.
    """
    if link.kind != "emulated" or link == LinkSettings():
        return None
    wire = Wire(link)

    def wrap(inner: Communicator) -> Communicator:
        return EmulatedLink(inner, wire)

    return wrap
