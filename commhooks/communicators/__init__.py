"""What runs collectives: a process group, N workers in one process, or a recorder around another communicator."""

from commhooks.communicators.collective import Collective
from commhooks.communicators.communicator import Communicator, Pending
from commhooks.communicators.lockstep import LockstepCommunicator, LockstepGroup
from commhooks.communicators.process_group import ProcessGroupCommunicator
from commhooks.communicators.recording import RecordingCommunicator

__all__ = [
    "Collective",
    "Communicator",
    "LockstepCommunicator",
    "LockstepGroup",
    "Pending",
    "ProcessGroupCommunicator",
    "RecordingCommunicator",
]
