"""Runs of training jobs under several hooks, side by side: what is run is data, and the command line is `commhooks`."""
