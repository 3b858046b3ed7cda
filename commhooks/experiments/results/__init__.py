"""The results of runs: each run in numbers, means over seeds with intervals, and whether a hook pays."""
