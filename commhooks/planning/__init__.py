"""Predictions of a step's time on a cluster, computed from measurements on one machine.

Call `commhooks.estimate`, `profile`, `probe` and `plan` from `commhooks`: in this package these are the names of
modules.
"""

from commhooks.planning.candidates import Candidate
from commhooks.planning.estimate import Estimate, HookEstimate
from commhooks.planning.plan import Choice, Plan
from commhooks.planning.probe import Probe
from commhooks.planning.profile import Profile

__all__ = ["Candidate", "Choice", "Estimate", "HookEstimate", "Plan", "Probe", "Profile"]
