"""Predictions of a step's time on a cluster, computed from measurements on one machine.

`estimate` needs numbers alone, `profile` and `probe` measure in the ranks of a training script, and `plan` puts
together what they measured. An installation has this package as `commhooks.experiments.predicting`.
"""

from .candidates import Candidate
from .errors import ProbeError, ProfileError
from .estimates import Estimate, HookEstimate, estimate
from .plans import Choice, Plan, plan
from .probes import Probe
from .probing import probe
from .profiles import Profile
from .profiling import profile

__all__ = [
    "Candidate",
    "Choice",
    "Estimate",
    "HookEstimate",
    "Plan",
    "Probe",
    "ProbeError",
    "Profile",
    "ProfileError",
    "estimate",
    "plan",
    "probe",
    "profile",
]
