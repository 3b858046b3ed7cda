"""Training with seldom communication: ranks train by themselves, and average every so many steps how far they went."""
