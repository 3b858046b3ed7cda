"""What the kernel does not do itself: one file for each feature, with what the wrapper needs for it."""
