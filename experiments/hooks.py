"""The compressor that a hook's name and settings describe, made before any process starts."""

from __future__ import annotations

import torch

import commhooks
from commhooks.compressors.codecs import Codec
from commhooks.language.compressor import Compressor
from commhooks.making import settings_of
from commhooks.scheduling.policy import POLICIES, PolicyName
from commhooks.sharded.gathering import code_of

from .seldom import Seldom
from .specs import Spec, is_seldom


def make_hook(spec: Spec, seed: int = 0) -> Compressor:
    """Return a new compressor for this hook; its random numbers use the seed, unless it has a seed of its own.

    Raises ValueError if there is no hook of this name, if it has no such setting, or if a value cannot work.
    """
    if is_seldom(spec):
        raise ValueError(
            f"hook {spec.label!r}: DiLoCo averages models, not gradients; only compare, sweep and plan support it; "
            f"name its compressor by itself, such as {Seldom.of(spec).compressor.label}"
        )
    policy_of(spec)
    plain = spec.having(policy=None)
    return commhooks.make_compressor(
        str(plain.with_default("seed", seed) if "seed" in settings_of(spec.name) else plain)
    )


def reduction_of(spec: Spec) -> Spec:
    """Return the hook without its setting `gather`, which concerns parameters and not gradients."""
    return spec.having(gather=None)


def gather_of(spec: Spec) -> Codec | torch.dtype | None:
    """Return the code or dtype in which parameters are gathered, from the setting `gather`; None: uncompressed."""
    asked = dict(spec.settings).get("gather")
    return None if asked is None else code_of(str(asked))


def policy_of(spec: Spec) -> PolicyName:
    """Return the order of collectives from the hook's setting `policy`; raise ValueError if it is unknown."""
    asked = dict(spec.settings).get("policy", "fifo")
    for policy in POLICIES:
        if policy == asked:
            return policy
    raise ValueError(f"hook {spec.label!r}: policy must be one of {', '.join(POLICIES)} (got {asked})")
