"""Command lines of earlier versions: for one release, each is read as the line that replaces it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Option = tuple[str, str | None]  # its name, and its value if it has one


def renewed(words: Sequence[str]) -> list[str] | None:
    """Return the words after `commhooks` in their present form; None if they have it already."""
    if not words:
        return None
    command, given = words[0], list(_options_in(words[1:]))
    if command == "run":
        command, now = "compare", _run(given)
    else:
        now = [each for option in given for each in _option(command, *option)]
        if now == given:
            return None
    return [command, *(word for option in now for word in option if word is not None)]


def _options_in(words: Sequence[str]) -> Iterator[Option]:
    rest = list(words)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if equals:
            yield option, value
        else:
            yield option, rest.pop(0) if rest and not rest[0].startswith("--") else None


def _run(given: list[Option]) -> list[Option]:
    """Return the options of `compare` for a single run that ends after its steps."""
    if dict(given).keys() & {"--help", "-h"}:
        return given
    needed = [("--hook", "all-reduce"), ("--go-on", "1"), ("--task", "TASK")]  # there is none of that name
    return _valued_first([*given, *(option for option in needed if option[0] not in dict(given))])


def _valued_first(options: list[Option]) -> list[Option]:
    """Return the options, those without a value last: a missing value must not be taken from the next option's name."""
    return sorted(options, key=lambda option: option[1] is None)


def _option(command: str, name: str, value: str | None) -> list[Option]:
    """Return the present form of a command's option: the same, another one, or one for each name in a list."""
    match command, name:
        case "leaderboard", "--only" | "--tasks":
            now = "--hook" if name == "--only" else "--task"
            names = [one.strip() for one in (value or "").split(",") if one.strip()]
            return [(now, one) for one in names] or [(now, value)]
    return [(name, value)]
