"""How long a step takes on a cluster, computed from what was measured on one machine."""
