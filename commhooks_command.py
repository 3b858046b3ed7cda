"""The program `commhooks`: it begins outside the package, which imports torch at once unless this module was first."""


def main() -> None:
    """Run the command line."""
    from commhooks.experiments.commands.front import main as run

    run()
