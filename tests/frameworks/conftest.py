"""The modules here import frameworks, which only the environment of `make test-frameworks` has."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["test_*.py"]

# Ranks are forked from a process that has imported these once: each would otherwise take seconds to import them.
PRELOAD = "accelerate.utils transformers.trainer transformers.models.gpt2.modeling_gpt2 lightning.pytorch peft"
os.environ.setdefault("WORLD_PRELOAD", PRELOAD)
