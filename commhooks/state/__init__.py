"""The state of compressors, by parameter, and its saving and restoring."""
