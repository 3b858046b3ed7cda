"""A side stream without a device: the inline scheduler runs over CPU tensors, and marks are reached when told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from commhooks.devices import SideStream
from commhooks.scheduling import connection


class ToldMark:
    """A mark that the device has reached once a test says so."""

    def __init__(self, *, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached

    def wait(self) -> None:
        """Do nothing: what is queued is done at once."""

    def synchronize(self) -> None:
        """Do nothing."""


class HostStream(SideStream):
    """A stream that does its work as it is queued, on a device that advances when told to."""

    def __init__(self, device: torch.device | None = None, *, keeps_up: bool = True) -> None:
        self.keeps_up = keeps_up
        self.marks: list[ToldMark] = []

    def join(self, other: SideStream) -> None:
        """Do nothing: there is one order."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def let_caller_follow(self) -> None:
        """Do nothing: the host has computed already."""

    def mark(self) -> ToldMark:
        self.marks.append(ToldMark(reached=self.keeps_up))
        return self.marks[-1]

    def reach(self, marks: int) -> None:
        """Let the device reach so many of the marks."""
        for mark in self.marks[:marks]:
            mark.reached = True


@contextlib.contextmanager
def as_on_nccl() -> Iterator[None]:
    """Make attachments take the same path as on NCCL, over any backend."""
    backend = mock.patch.object(connection, "backend_of", return_value="nccl")
    with backend, mock.patch.object(connection, "SideStream", HostStream):
        yield
