"""What only studies are made of, run from a checkout by `python -m experiments.studies`; nothing else imports it."""
