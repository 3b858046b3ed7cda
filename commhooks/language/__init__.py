"""What the author of a compressor reads: compressors, buckets, requests, entries of state, random numbers.

docs/guide/compressors.md goes through it with examples.
"""
