"""The project's own measurements, with `commhooks.experiments`: in a checkout only, never installed."""
