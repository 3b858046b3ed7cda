"""What a rank does: put the hook on the model, train, and measure every step."""
