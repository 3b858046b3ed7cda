"""Workers that take turns inside one process: their connections, and the steps that they make together."""

from commhooks.diloco.diloco import step_in_lockstep
from commhooks.exchange.exchanger import average_in_lockstep
from commhooks.scheduling.lockstep import lockstep_connections

__all__ = ["average_in_lockstep", "lockstep_connections", "step_in_lockstep"]
