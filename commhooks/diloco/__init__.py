"""Low-communication training: ranks train alone, and average their progress once every few steps."""

from commhooks.diloco.averaging import ModelAverager
from commhooks.diloco.counts import DiLoCoStatistics
from commhooks.diloco.diloco import DiLoCo

__all__ = ["DiLoCo", "DiLoCoStatistics", "ModelAverager"]
