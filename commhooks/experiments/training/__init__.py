"""The work of a rank: putting the hook on the model, training, and measuring every step."""
