"""Training with infrequent communication: ranks train alone, and average their progress once every few steps."""
