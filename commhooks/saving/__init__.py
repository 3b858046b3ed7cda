"""Saved state: its layout, the one check of it, and its readers and writers for every kind of checkpoint."""
