"""What the author of a compressor reads: compressors, requests, entries of state, random numbers."""
