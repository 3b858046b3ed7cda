"""How often the verdict on a hook is right: repetitions of whole comparisons, and recorded runs resampled."""
