"""The exceptions that commhooks raises: one tree, so that `except CommHooksError` catches them all."""

from __future__ import annotations


class CommHooksError(Exception):
    """Stand at the root of every exception of this package."""


class SettingsError(CommHooksError, ValueError):
    """Refuse a setting, or a combination of settings, that cannot work; raised when the object is built."""


class HookTypeError(SettingsError, TypeError):
    """Refuse something of the wrong type in the place of a hook, a hook's type, a model or a process group."""


class AttachError(CommHooksError, RuntimeError):
    """Refuse to attach to a model, or report ranks that disagree about what they attached."""


class HookDidNotRunError(AttachError):
    """Report an optimizer's step on gradients of which none has passed through the attached compressor."""


class GradientError(CommHooksError, TypeError):
    """Refuse a gradient that no compressor can average, an integer one for example."""


class CheckpointError(CommHooksError, RuntimeError):
    """Refuse to save what could not be loaded, or to load what does not fit; what was there before stays."""


class CompressorError(CommHooksError, RuntimeError):
    """Report a failure inside a compressor: the message names rank, step, bucket, parameters and cause."""


class CollectiveError(CommHooksError, RuntimeError):
    """Report a collective that failed, here or because another rank failed first."""
