"""The predictions of `commhooks estimate` and `commhooks plan`, compared with real steps."""
