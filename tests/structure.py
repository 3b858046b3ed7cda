"""How the packages are built, in numbers: `python -m tests.structure` prints them as tables.

A line of code holds a token that is no comment and no docstring. A function's length is its lines of code from `def`
to the end, those of functions inside it too.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.step_calls import calls_of_a_step, files_of

ROOT = Path(__file__).parent.parent
STUDIES = "experiments.studies"
PACKAGES = ("commhooks", "ddp_core", "experiments", STUDIES)
"""One inside another is none of its files."""
MOST_LINES = 450
"""Of a file, all of them counted."""
CENTRES = {"commhooks/engine/engine.py": "Engine", "ddp_core/reducer.py": "Reducer"}
"""By file, the class to which each package's work comes back, and which grows if nobody looks."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Imports = dict[str, set[str]]
"""For each module the modules of its package that it imports; or the same of folders."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


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
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @functools.cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @functools.cached_property
    def code(self) -> set[int]:
        """The numbers of the lines of code."""
        lines = {n for t in self.tokens if t.type not in _NO_CODE for n in range(t.start[0], t.end[0] + 1)}
        return lines - {n for text in _docstrings(self.tree) for n in range(text.lineno, _end(text) + 1)}

    @property
    def comments(self) -> int:
        """How many comments have a line of their own."""
        return sum(t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip() for t in self.tokens)

    @property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @property
    def function_lengths(self) -> list[int]:
        return [len(self.code & set(range(node.lineno, _end(node) + 1))) for node in self.functions]


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


def longest_files(sources: Iterable[Source], most: int = MOST_LINES) -> dict[str, int]:
    """Return the files of more than `most` lines, with their lines."""
    return {str(source.path): source.lines for source in sources if source.lines > most}


# --- imports ----------------------------------------------------------------------------------------------------------


def imports_of(sources: Sequence[Source]) -> Imports:
    """Return which file imports which; imports inside functions and under TYPE_CHECKING count like all others.

    To import `a.b.c` runs the `__init__` of `a` and `a.b`, but names neither: only `from a.b import name`, for a name
    that is no module, is an import of the package `a.b`.
    """
    modules = {source.module for source in sources}
    return {
        source.module: {name for name in _imported(source, modules) if name in modules and name != source.module}
        for source in sources
    }


def _imported(source: Source, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, source)
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                yield inside if inside in modules else base


def _base_of(node: ast.ImportFrom, source: Source) -> str:
    """Return the full name of what stands between `from` and `import`."""
    if not node.level:
        return node.module or ""
    up = node.level - (source.path.name == "__init__.py")
    above = source.module.split(".")
    return ".".join([*above[: len(above) - up], *([node.module] if node.module else [])])


def circles(imports: Imports) -> list[list[str]]:
    """Return the groups of modules that all import each other, directly or through others; each one sorted."""
    reached = {module: _reached_from(module, imports) for module in imports}
    groups = {
        tuple(sorted({module, *(other for other in reached[module] if module in reached[other])}))
        for module in imports
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def _reached_from(module: str, imports: Imports) -> set[str]:
    reached: set[str] = set()
    left = [module]
    while left:
        new = imports[left.pop()] - reached
        reached |= new
        left += new
    return reached


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


def longest_chain(imports: Imports) -> list[str]:
    """Return as many names as possible, each of which imports the next; raise graphlib.CycleError for a circle."""
    chains: dict[str, list[str]] = {}
    for name in graphlib.TopologicalSorter(imports).static_order():  # what is imported comes first
        chains[name] = [name, *max((chains[other] for other in sorted(imports[name])), key=len, default=[])]
    return max(chains.values(), key=len)


# --- names ------------------------------------------------------------------------------------------------------------


def private_functions(sources: Sequence[Source]) -> list[str]:
    """Return the names of private functions and methods, each once."""
    names = {node.name for source in sources for node in source.functions}
    return sorted(name for name in names if name.startswith("_") and not name.endswith("__"))


def named_once(sources: Sequence[Source]) -> list[str]:
    """Return the private functions that the package names in one place, besides where they are defined."""
    uses = Counter(t.string for source in sources for t in source.tokens if t.type == tokenize.NAME)
    definitions = Counter(node.name for source in sources for node in source.functions)
    return [name for name in private_functions(sources) if uses[name] - definitions[name] <= 1]


def short_and_named_once(sources: Sequence[Source], most: int = 3) -> list[str]:
    """Return the functions of `named_once` with at most so many lines of code: most are better read in their place."""
    once = set(named_once(sources))
    pairs = (pair for source in sources for pair in zip(source.functions, source.function_lengths, strict=True))
    return sorted(node.name for node, length in pairs if node.name in once and length <= most)


def words_of(source: Source) -> set[str]:
    """Return the names that a file uses or assigns, and its strings, each as a whole."""
    nodes = list(ast.walk(source.tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | attributes | {str(node.value) for node in nodes if isinstance(node, ast.Constant)}


def attributes_of(class_name: str, path: Path) -> set[str]:
    """Return the distinct `x` of every `self.x` that the class assigns in its methods, and a dataclass's fields."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name)
    fields = {s.target.id for s in found.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    return fields | {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def table(package: str, root: Path = ROOT) -> str:
    """Return what `python -m tests.structure` prints of a package."""
    sources = sources_of(package, root)
    lines = [f"{'file':48}{'lines':>7}{'code':>7}{'comments':>10}{'functions':>11}{'median':>8}{'p90':>6}"]
    lines += [_row(str(source.path), [source]) for source in sources]
    lines += [_row(f"{package}, {len(sources)} files", sources)]
    long = longest_files(sources)
    lines += [f"files over {MOST_LINES} lines: {len(long)}", *(f"  {path}: {n}" for path, n in long.items())]
    once, short, private = named_once(sources), short_and_named_once(sources), private_functions(sources)
    lines += [f"private functions named once: {len(once)} of {len(private)}; {len(short)} of at most 3 lines of code"]
    folders = between_folders(imports_of(sources))
    for what, found in {"": circles(imports_of(sources)), " between folders": circles(folders)}.items():
        lines += [f"circles of imports{what}: {len(found)}", *(f"  {', '.join(circle)}" for circle in found)]
    if not circles(folders):
        chain = longest_chain(folders)
        lines += [f"longest chain of imports between folders: {len(chain)}", f"  {', '.join(chain)}"]
    return "\n".join(lines)


def _row(title: str, sources: Sequence[Source]) -> str:
    """Comments are those with a line of their own, per 100 lines of code; lengths are of functions."""
    lengths = [length for source in sources for length in source.function_lengths]
    code = sum(len(source.code) for source in sources)
    comments = 100 * sum(source.comments for source in sources) / code if code else 0.0
    middle, long = (f"{statistics.median(lengths):g}", f"{_ninth_tenth(lengths):g}") if lengths else ("", "")
    lines = sum(source.lines for source in sources)
    return f"{title:48}{lines:7}{code:7}{comments:10.1f}{len(lengths):11}{middle:>8}{long:>6}"


def _ninth_tenth(lengths: list[int]) -> float:
    """Return the length that nine functions in ten do not exceed."""
    return sorted(lengths)[-(-9 * len(lengths) // 10) - 1]


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield docstrings, and the strings that stand below a field or a constant as one."""
    for node in ast.walk(tree):
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef | Function) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def _end(node: ast.expr | ast.stmt) -> int:
    assert node.end_lineno is not None, "parsed from text, so every node has an end"
    return node.end_lineno


if __name__ == "__main__":
    print("Comments: those with a line of their own, per 100 lines of code. Median, p90: a function's lines of code.\n")
    for package in PACKAGES:
        print(table(package), end="\n\n")
    for path, class_name in CENTRES.items():
        print(f"attributes of {class_name}: {len(attributes_of(class_name, ROOT / path))}")
    for compressor, calls in calls_of_a_step().items():
        print(f"a steady-state step of {compressor}: {len(files_of(calls))} files, {calls.total()} calls")
