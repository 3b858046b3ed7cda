"""Tests of `ddp_core.guard`: programs whose replicas drift apart without a word, and programs that are sound."""
