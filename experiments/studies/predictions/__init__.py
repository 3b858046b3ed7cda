"""The predictions of `commhooks plan`, compared with real steps."""
