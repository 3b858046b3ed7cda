"""The studies, run from a checkout by `python -m experiments.studies`; nothing else imports this package."""
