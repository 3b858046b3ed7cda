"""PowerSGD, and what it is made of."""

from commhooks.compressors.powersgd.powersgd import PowerSGD
from commhooks.compressors.powersgd.unbiased import UnbiasedPowerSGD

__all__ = ["PowerSGD", "UnbiasedPowerSGD"]
