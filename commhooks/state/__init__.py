"""What compressors remember, by parameter, and how it is saved and restored."""
