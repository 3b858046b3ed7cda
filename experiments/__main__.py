"""`python -m experiments`, in a checkout, is the same as `commhooks`."""

from .front import main

main()
