"""Workers that take turns inside one process: their lines, and the steps that they make together."""

from commhooks.diloco.diloco import step_in_lockstep
from commhooks.exchange.exchanger import average_in_lockstep
from commhooks.scheduling.lockstep import lockstep_lines

__all__ = ["average_in_lockstep", "lockstep_lines", "step_in_lockstep"]
