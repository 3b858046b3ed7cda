"""What `commhooks` offers: names that are imported on use, and rooms."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import subprocess
import sys
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


def test_type_checkers_see_the_names_that_are_resolved() -> None:
    tree = ast.parse(Path(commhooks.__file__).read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guard.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    rooms = {name for name, module in seen.items() if module == "commhooks"}
    at_once = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == names._MODULE_OF | dict.fromkeys(names._ROOMS, "commhooks")
    assert sorted((seen.keys() | at_once) - {"TYPE_CHECKING", "VERSION"} - rooms) == commhooks.__all__


HEAVY = ("scipy", "matplotlib", "rich", "typer", "pandas", "sklearn", "torch._dynamo", "torch.utils.tensorboard")
"""Who only registers a hook waits for none of these; what needs them imports them when it is called."""


def test_a_new_process_loads_a_saved_hook_and_imports_no_subpackage_that_it_does_not_use_and_nothing_heavy(
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
