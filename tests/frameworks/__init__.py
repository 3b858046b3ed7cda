"""Integrations with the real frameworks on real ranks: `make test-frameworks`, in an environment of its own."""
