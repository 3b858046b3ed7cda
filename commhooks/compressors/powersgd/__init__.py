"""PowerSGD, and what it is made of."""

from commhooks.compressors.powersgd.powersgd import PowerSGD

__all__ = ["PowerSGD"]
