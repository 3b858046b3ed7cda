"""`python -m experiments`, in a checkout, is the same as `commhooks`."""

from .commands.front import main

main()
