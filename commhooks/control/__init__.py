"""What runs in training, beside the hooks: a controller that changes compressors as the link changes."""

from commhooks.control.adaptive import Adaptive, Decision
from commhooks.control.rule import AdaptiveRule

__all__ = ["Adaptive", "AdaptiveRule", "Decision"]
