"""What compressors remember, by parameter; how it is saved, and taken up again."""
