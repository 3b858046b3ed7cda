"""What a hook's name and settings describe, made before any process starts."""

from __future__ import annotations

import torch

from commhooks.compressors.codecs import Codec
from commhooks.experiments.specs import Spec
from commhooks.language.compressor import Compressor
from commhooks.making import policy_in, read_hook
from commhooks.scheduling.policy import PolicyName
from commhooks.sharded.gathering import code_of


def make_hook(spec: Spec, seed: int = 0) -> Compressor:
    """Return a new compressor for this hook; its random numbers use the seed, unless it has a seed of its own.

    Raises ValueError if there is no hook of this name, if it has no such setting, or if a value cannot work.
    """
    return read_hook(spec.label, seed=seed).compressor


def policy_of(spec: Spec) -> PolicyName:
    """Return the order of collectives that a hook has; raise ValueError if it is unknown."""
    return policy_in(spec) or "fifo"


def gather_of(spec: Spec) -> Codec | torch.dtype | None:
    """Return the code or dtype in which parameters are gathered, from the setting `gather`; None: uncompressed."""
    asked = dict(spec.settings).get("gather")
    return None if asked is None else code_of(str(asked))
