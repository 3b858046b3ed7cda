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
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.saving import checkpoints as checkpoint


class Countdown:
    """Return whether the place is passed for the n-th time, and leave the mark."""

    def __init__(self, passes: int, mark: Path) -> None:
        self._left = passes
        self._mark = mark

    def is_over(self) -> bool:
        self._left -= 1
        return self._left == 0

    def die(self) -> NoReturn:
        self._mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive after SIGKILL")


def arm() -> None:
    """Patch the first place at which nobody was killed yet, if it is on this rank."""
    planned = [place for place in os.environ.get("KILL_AT", "").split(",") if place]
    for number, text in enumerate(planned):
        place, rank, passes = text.split("@")
        mark = Path(os.environ["KILL_MARKS"]) / f"{number}-{place}"
        if not mark.exists():
            if rank == os.environ["RANK"]:
                PLACES[place](Countdown(int(passes), mark))
            return


def _in_forward(countdown: Countdown) -> None:
    _patch_method(nn.Dropout, "forward", _dropout, countdown, False)


def _in_backward(countdown: Countdown) -> None:
    _patch_method(nn.Dropout, "forward", _dropout, countdown, True)


def _dropout(self: nn.Dropout, original: Any, countdown: Countdown, in_backward: bool, inputs: Tensor) -> Tensor:
    output: Tensor = original(self, inputs)
    if countdown.is_over():
        if not in_backward:
            countdown.die()
        output.register_hook(lambda _: countdown.die())
    return output


def _in_collective(countdown: Countdown) -> None:
    _patch_method(ProcessGroupCommunicator, "start", _start, countdown)


def _start(self: ProcessGroupCommunicator, original: Any, countdown: Countdown, collective: Any) -> Any:
    pending = original(self, collective)
    if countdown.is_over():
        countdown.die()
    return pending


def _in_writing(name: str, countdown: Countdown) -> None:
    _patch_function(checkpoint, "write_tensors", _write_tensors, countdown, name)


def _write_tensors(original: Any, countdown: Countdown, name: str, path: Path, content: Any, *, flush: bool) -> Any:
    if path.name == name and countdown.is_over():
        whole = io.BytesIO()
        torch.save(content, whole)
        path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
        countdown.die()
    return original(path, content, flush=flush)


def _in_writing_manifest(countdown: Countdown) -> None:
    _patch_method(Path, "write_text", _write_text, countdown)


def _write_text(self: Path, original: Any, countdown: Countdown, text: str) -> None:
    if self.name != "manifest.json" or not countdown.is_over():
        original(self, text)
        return
    original(self, text[: len(text) // 2])
    countdown.die()


def _before_flush(countdown: Countdown) -> None:
    _patch_function(os, "fsync", _flush, countdown)


def _flush(original: Any, countdown: Countdown, descriptor: int) -> None:
    if countdown.is_over():
        countdown.die()
    original(descriptor)


def _at_rename(prefix: str, after: bool, countdown: Countdown) -> None:
    _patch_method(Path, "rename", _rename, countdown, prefix, after)


def _rename(self: Path, original: Any, countdown: Countdown, prefix: str, after: bool, target: Path) -> None:
    if not self.name.startswith(prefix) or not countdown.is_over():
        original(self, target)
        return
    if after:
        original(self, target)
    countdown.die()


def _in_removal(prefix: str, countdown: Countdown) -> None:
    _patch_function(shutil, "rmtree", _remove, countdown, prefix)


def _remove(original: Any, countdown: Countdown, prefix: str, path: Path, **settings: Any) -> None:
    if path.name.startswith(prefix) and countdown.is_over():
        next(path.iterdir()).unlink()
        countdown.die()
    original(path, **settings)


def _in_loading(countdown: Countdown) -> None:
    _patch_function(torch, "load", _load, countdown)


def _load(original: Any, countdown: Countdown, *args: Any, **settings: Any) -> Any:
    if countdown.is_over():
        countdown.die()
    return original(*args, **settings)


def _patch_method(owner: type, name: str, replacement: Callable[..., Any], *args: Any) -> None:
    setattr(owner, name, functools.partialmethod(replacement, getattr(owner, name), *args))


def _patch_function(module: Any, name: str, replacement: Callable[..., Any], *args: Any) -> None:
    setattr(module, name, functools.partial(replacement, getattr(module, name), *args))


PLACES: dict[str, Callable[[Countdown], None]] = {
    "forward": _in_forward,
    "backward": _in_backward,
    "collective": _in_collective,
    "rank0.pt": functools.partial(_in_writing, "rank0.pt"),
    "rank1.pt": functools.partial(_in_writing, "rank1.pt"),
    "shared.pt": functools.partial(_in_writing, "shared.pt"),
    "manifest": _in_writing_manifest,
    "flush": _before_flush,
    "before rename": functools.partial(_at_rename, ".writing-", False),
    "after rename": functools.partial(_at_rename, ".writing-", True),
    "old renamed": functools.partial(_at_rename, "checkpoint-", True),
    "removing": functools.partial(_in_removal, ".removing-checkpoint-"),
    "clearing": functools.partial(_in_removal, ".removing-step-"),
    "loading": _in_loading,
}
