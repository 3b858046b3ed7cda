"""What runs in training, beside the hooks: a controller that changes compressors as the link changes."""
