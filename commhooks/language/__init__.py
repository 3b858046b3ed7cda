"""The interface for authors of compressors: compressors, buckets, requests, entries of state, random numbers.

docs/guide/compressors.md introduces it with examples.
"""
