"""The command line: its commands, their help, and how they behave in a terminal."""
