"""`python -m commhooks.experiments` is the same as `commhooks`."""

from commhooks.experiments.commands.front import main

main()
