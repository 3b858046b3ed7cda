"""Steps of simulated clusters: measurements on this machine, and the step times that follow for many ranks."""
