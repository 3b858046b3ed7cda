"""The prediction of a step's time: from a profile, measured or made of tables, and a network, probed or given.

`profile` and `probe` measure in the ranks of a training script, `profile_from_tables` and `gloo_link` need numbers,
`predict` computes a step from the two, and `plan` compares all hooks.
"""

from commhooks.experiments.planning.candidates import Candidate
from commhooks.experiments.planning.costs import gloo_link
from commhooks.experiments.planning.errors import ProbeError, ProfileError
from commhooks.experiments.planning.plans import Choice, Plan, plan
from commhooks.experiments.planning.predicting import Prediction, predict
from commhooks.experiments.planning.probes import Probe
from commhooks.experiments.planning.probing import probe
from commhooks.experiments.planning.profiles import Profile
from commhooks.experiments.planning.profiling import profile
from commhooks.experiments.planning.tables import profile_from_tables
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.rounds import Rounds

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
