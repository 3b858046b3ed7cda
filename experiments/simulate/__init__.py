"""Steps on clusters that are not there: what is measured here, and what follows for many ranks."""
