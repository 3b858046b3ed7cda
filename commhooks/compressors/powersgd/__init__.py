"""PowerSGD and its parts."""

from commhooks.compressors.powersgd.adaptive_rank import AdaptiveRank
from commhooks.compressors.powersgd.powersgd import PowerSGD
from commhooks.compressors.powersgd.unbiased import UnbiasedPowerSGD

__all__ = ["AdaptiveRank", "PowerSGD", "UnbiasedPowerSGD"]
