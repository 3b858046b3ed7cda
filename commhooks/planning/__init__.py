"""How long a step takes on a cluster, computed from what was measured on one machine.

The functions that make these are `commhooks.estimate`, `profile`, `probe` and `plan`: here modules have their names.
"""

from commhooks.planning.candidates import Candidate
from commhooks.planning.estimate import Estimate, HookEstimate
from commhooks.planning.plan import Choice, Plan
from commhooks.planning.probe import Probe
from commhooks.planning.profile import Profile

__all__ = ["Candidate", "Choice", "Estimate", "HookEstimate", "Plan", "Probe", "Profile"]
