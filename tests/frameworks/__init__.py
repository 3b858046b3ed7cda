"""Integrations with the real frameworks on real ranks, and the wheel by itself: `make test-frameworks`."""
