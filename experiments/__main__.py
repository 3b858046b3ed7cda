"""`python -m experiments`, in a checkout, is `commhooks`."""

from .front import main

main()
