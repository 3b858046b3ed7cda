"""What `commhooks` offers: names that are imported on use, and rooms."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import commhooks
from commhooks import PowerSGDState, names, powerSGD_hook

ROOT = Path(__file__).parent.parent


def test_a_name_is_a_class_or_function_that_pickles_by_reference_and_no_module() -> None:
    for name in commhooks.__all__:
        found = getattr(commhooks, name)
        assert callable(found) and pickle.loads(pickle.dumps(found)) is found, name
        assert importlib.util.find_spec(f"commhooks.{name}") is None, f"importing the module would hide {name}"


def test_no_name_of_a_room_is_one_of_its_modules() -> None:
    for room in names._ROOMS:
        offered = importlib.import_module(f"commhooks.{room}")
        modules = {path.stem for folder in getattr(offered, "__path__", ()) for path in Path(folder).glob("*.py")}
        assert not modules & set(offered.__all__), room


def test_type_checkers_see_the_names_that_are_resolved() -> None:
    tree = ast.parse(Path(commhooks.__file__).read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guard.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    rooms = {name for name, module in seen.items() if module == "commhooks"}
    at_once = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == names._MODULE_OF | dict.fromkeys(names._ROOMS, "commhooks")
    assert sorted((seen.keys() | at_once) - {"TYPE_CHECKING", "VERSION"} - rooms) == commhooks.__all__


def test_import_star_takes_what_all_lists_and_warns_of_nothing() -> None:
    scope: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("from commhooks import *", scope)
    assert sorted(scope.keys() - {"__builtins__"}) == commhooks.__all__


def test_dir_shows_names_and_rooms() -> None:
    shown = dir(commhooks)
    assert {*commhooks.__all__, *names._ROOMS, "__version__"} <= set(shown)


def test_rooms_are_attributes_and_what_does_not_exist_is_none() -> None:
    assert commhooks.wrappers.ErrorFeedback is commhooks.ErrorFeedback
    with pytest.raises(AttributeError, match="module 'commhooks' has no attribute 'atach'"):
        commhooks.atach  # type: ignore[attr-defined]  # noqa: B018  # 'Module has no attribute "atach"'


HEAVY = ("scipy", "matplotlib", "rich", "typer", "pandas", "sklearn", "torch._dynamo", "torch.utils.tensorboard")
"""Who only registers a hook waits for none of these; what needs them imports them when it is called."""


def test_a_new_process_loads_a_saved_hook_and_imports_no_room_that_it_does_not_use_and_nothing_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"settings": {"wire": "", "matrix_approximation_rank": 3}, "state": {}}
    monkeypatch.setattr(PowerSGDState, "__getstate__", lambda _: saved)
    torch.save((PowerSGDState(None), powerSGD_hook), tmp_path / "hook.pt")
    program = (
        "import commhooks, sys, torch\n"
        "state, hook = torch.load(sys.argv[1])\n"
        "print(state.matrix_approximation_rank, hook.__name__)\n"
        "print(*sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "hook.pt")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    loaded, modules = ran.stdout.splitlines()
    assert loaded == "3 powerSGD_hook"
    unused = ("checkpoints", "control", "integrations", "testing")
    assert not {f"commhooks.{room}" for room in unused} & set(modules.split())
    assert not set(HEAVY) & set(modules.split())


def test_every_name_is_described_on_one_page_of_the_reference() -> None:
    pages = [*(ROOT / "docs/reference").rglob("*.md")]
    described = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M)]
    assert len(described) == len(set(described))
    found = {name: getattr(commhooks, name).__module__ for name in commhooks.__all__}
    places = {name: {f"commhooks.{name}", module, f"{module.split('.')[0]}.{name}"} for name, module in found.items()}
    assert [name for name, any_of in places.items() if not any_of & {*described}] == []
