"""Sharded models: compressed communication for FSDP2."""
