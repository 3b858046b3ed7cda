"""Communicators: over a process group, among N workers in one process, or a recorder around another communicator."""

from commhooks.communicators.collective import Collective, Communicator, Pending, RecordingCommunicator
from commhooks.communicators.lockstep import LockstepCommunicator, LockstepGroup
from commhooks.communicators.process_group import ProcessGroupCommunicator

__all__ = [
    "Collective",
    "Communicator",
    "LockstepCommunicator",
    "LockstepGroup",
    "Pending",
    "ProcessGroupCommunicator",
    "RecordingCommunicator",
]
