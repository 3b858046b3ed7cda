"""The command line: its commands, their help, and their behaviour in a terminal."""
