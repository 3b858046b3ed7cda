"""The prediction of a step's time: from a profile, measured or made of tables, and a network, probed or given.

`profile` and `probe` measure in the ranks of a training script, `profile_from_tables` and `gloo_link` need numbers,
`predict` computes a step from the two, and `plan` compares all hooks. An installation has this package as
`commhooks.experiments.planning`.
"""

from ..timing.link import Link
from ..timing.rounds import Rounds
from .candidates import Candidate
from .costs import gloo_link
from .errors import ProbeError, ProfileError
from .plans import Choice, Plan, plan
from .predicting import Prediction, predict
from .probes import Probe
from .probing import probe
from .profiles import Profile
from .profiling import profile
from .tables import profile_from_tables

__all__ = [
    "Candidate",
    "Choice",
    "Link",
    "Plan",
    "Prediction",
    "Probe",
    "ProbeError",
    "Profile",
    "ProfileError",
    "Rounds",
    "gloo_link",
    "plan",
    "predict",
    "probe",
    "profile",
    "profile_from_tables",
]
