"""The leaderboard: small tasks trained under every compressor, by workers that share a process, and their standings."""
