"""Benchmarks: each figure is a ratio to a peer, measured in turns within one run."""
