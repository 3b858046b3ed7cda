"""A controller that changes compressors during training as the link changes."""

from commhooks.control.adaptive import Adaptive, Decision
from commhooks.control.decider import AdaptiveRule

__all__ = ["Adaptive", "AdaptiveRule", "Decision"]
