"""How the packages are built: their files, parsed once, what these import, and circles of imports."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
STUDIES = "experiments.studies"
EXPERIMENTS = "commhooks.experiments"
PACKAGES = ("commhooks", "ddp_core", EXPERIMENTS, STUDIES)
"""One inside another is none of its files."""

Imports = dict[str, set[str]]
"""For each module the modules of its package that it imports; or the same of folders."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One file, parsed."""

    path: Path
    module: str
    """Its full name; a package's `__init__` has the package's."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def imports(self) -> list[tuple[str, ...]]:
        """What each import may mean, wherever in the file it stands: `from a import b` is of a.b, or of a."""
        return list(_imports_in(self))

    @property
    def imported(self) -> set[str]:
        """Every name in `imports`."""
        return {name for names in self.imports for name in names}

    @property
    def dotted_names(self) -> Iterator[str]:
        """Every dotted name that the file spells out, such as `torch.distributed.all_reduce`."""
        return (ast.unparse(node) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))


@functools.cache
def sources_of(package: str, root: Path = ROOT) -> list[Source]:
    """Return every file of a package, without those of another one inside it."""
    found = []
    inside = [root.joinpath(*other.split(".")) for other in PACKAGES if other.startswith(f"{package}.")]
    for path in sorted(root.joinpath(*package.split(".")).rglob("*.py")):
        if any(path.is_relative_to(other) for other in inside):
            continue
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(path.relative_to(root), module, path.read_text(encoding="utf-8")))
    return found


def _imports_in(source: Source) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, source)
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def _base_of(node: ast.ImportFrom, source: Source) -> str:
    """Return the full name of what stands between `from` and `import`."""
    if not node.level:
        return node.module or ""
    up = node.level - (source.path.name == "__init__.py")
    above = source.module.split(".")
    return ".".join([*above[: len(above) - up], *([node.module] if node.module else [])])


def imports_of(sources: Sequence[Source]) -> Imports:
    """Return which file imports which; imports inside functions and under TYPE_CHECKING count like all others.

    To import `a.b.c` runs the `__init__` of `a` and `a.b`, but names neither: only `from a.b import name`, for a name
    that is no module, is an import of the package `a.b`.
    """
    modules = {source.module for source in sources}
    found = {}
    for source in sources:
        meant = {next((name for name in names if name in modules), source.module) for names in source.imports}
        found[source.module] = meant - {source.module}
    return found


def between_folders(imports: Imports) -> Imports:
    """Return which folder of a package imports which.

    A folder counts with all that is inside it; a module that lies beside the folders counts as a folder.
    """
    deep = min(module.count(".") for module in imports) + 2
    folder = {module: ".".join(module.split(".")[:deep]) for module in imports}
    found: Imports = {name: set() for name in folder.values()}
    for module, others in imports.items():
        found[folder[module]] |= {folder[other] for other in others} - {folder[module]}
    return found


def words_of(source: Source) -> set[str]:
    """Return the names that a file uses or assigns, and its strings, each as a whole."""
    words = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant):
            words.add(str(node.value))
    return words
