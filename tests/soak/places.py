"""Let a training script kill itself at a chosen place, once.

KILL_AT names places in order, each as `<place>@<rank>@<how often it is passed>`, with commas between; KILL_MARKS is
the folder in which a file says that it was done. Each life of the script is armed with the first that was not.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.saving import checkpoints as checkpoint

Original = Callable[..., Any]
Death = Callable[[], NoReturn]


def arm() -> None:
    """Patch the first place at which nobody was killed yet, if it is on this rank."""
    planned = [place for place in os.environ.get("KILL_AT", "").split(",") if place]
    for number, text in enumerate(planned):
        name, rank, passes = text.split("@")
        mark = Path(os.environ["KILL_MARKS"]) / f"{number}-{name}"
        if not mark.exists():
            if rank == os.environ["RANK"]:
                PLACES[name].arm(int(passes), functools.partial(_die, mark))
            return


def _die(mark: Path) -> NoReturn:
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive after SIGKILL")


def _before(die: Death, _original: Original, *_args: Any, **_named: Any) -> None:
    die()


def _after(die: Death, original: Original, *args: Any, **named: Any) -> None:
    original(*args, **named)
    die()


def _in_backward(die: Death, original: Original, *args: Any) -> Any:
    output = original(*args)
    output.register_hook(lambda _: die())
    return output


def _half_of_tensors(die: Death, _original: Original, path: Path, content: Any, **_: Any) -> None:
    whole = io.BytesIO()
    torch.save(content, whole)
    path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    die()


def _half_of_text(die: Death, original: Original, path: Path, text: str, **named: Any) -> None:
    original(path, text[: len(text) // 2], **named)
    die()


def _after_one_file(die: Death, _original: Original, path: Path, **_: Any) -> None:
    next(path.iterdir()).unlink()
    die()


class Place(NamedTuple):
    """A function of a module or a class, and how the process dies in it if its first argument is of these names."""

    owner: Any
    function: str
    act: Callable[..., Any]
    names: str = ""
    """What the name of the path begins with that it is given first."""

    def arm(self, passes: int, die: Death) -> None:
        """Let the process die when the place is passed for the n-th time."""
        original, left = getattr(self.owner, self.function), passes

        def passed(*args: Any, **named: Any) -> Any:
            nonlocal left
            left -= not self.names or args[0].name.startswith(self.names)
            if left == 0:
                left = -1  # what still happens may pass here again
                return self.act(die, original, *args, **named)
            return original(*args, **named)

        setattr(self.owner, self.function, passed)


PLACES = {
    "forward": Place(nn.Dropout, "forward", _before),
    "backward": Place(nn.Dropout, "forward", _in_backward),
    "collective": Place(ProcessGroupCommunicator, "start", _after),
    **{
        name: Place(checkpoint, "write_tensors", _half_of_tensors, name)
        for name in ("rank0.pt", "rank1.pt", "shared.pt")
    },
    "manifest": Place(Path, "write_text", _half_of_text, "manifest.json"),
    "flush": Place(os, "fsync", _before),
    "before rename": Place(Path, "rename", _before, ".writing-"),
    "after rename": Place(Path, "rename", _after, ".writing-"),
    "old renamed": Place(Path, "rename", _after, "checkpoint-"),
    "removing": Place(shutil, "rmtree", _after_one_file, ".removing-checkpoint-"),
    "clearing": Place(shutil, "rmtree", _after_one_file, ".removing-step-"),
    "loading": Place(torch, "load", _before),
}
