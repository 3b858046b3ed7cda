"""The exceptions that commhooks raises: one hierarchy, which `except CommHooksError` catches.

`NotAveragedError` alone is ddp_core's, whose guard raises it (`ddp_core.errors`).
"""

from __future__ import annotations


class CommHooksError(Exception):
    """The base class of every exception in this package."""


class SettingsError(CommHooksError, ValueError):
    """A setting, or a combination of settings, that cannot work; raised when the object is built."""


class HookTypeError(SettingsError, TypeError):
    """An object of the wrong type given as a hook, a hook's type, a model or a process group; or an unknown option."""


class AttachError(CommHooksError, RuntimeError):
    """A model that no compressor can be attached to, or ranks that disagree about the attachment."""


class GradientError(CommHooksError, TypeError):
    """A gradient that no compressor can average, such as an integer gradient."""


class CheckpointError(CommHooksError, RuntimeError):
    """State that cannot be saved or loaded, or does not match the run; the run is unchanged."""


class CompressorError(CommHooksError, RuntimeError):
    """A failure inside a compressor; the message names rank, step, bucket, parameters and cause."""


class CollectiveError(CommHooksError, RuntimeError):
    """A collective that failed, on this rank or because another rank failed first."""
