"""Run all that guards a release, and continue where it was stopped: `python -m tests.all`, which is `make test-all`.

Each stage is a command of its own. Those that passed are not run again until a file changes; `--anew` runs them all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.versions import EVERY_ROW

ROOT = Path(__file__).parents[1]
DONE = ROOT / ".test-all.json"
WORKERS = str(min(8, len(os.sched_getaffinity(0)) + 1))
STAGES = {
    "check": ["make", "check"],
    "every row, every exit": [
        *(sys.executable, "-m", "pytest", "-q", "-n", WORKERS, "--dist", "worksteal"),
        *("-m", EVERY_ROW),
    ],
    "PyTorch's suite": ["make", "test-torch-suite"],
    "virtual device": ["make", "test-virtual-device"],
    "eager": ["make", "test-eager"],
    "processors": ["make", "test-processors"],
    "frameworks": ["make", "test-frameworks"],
    "another PyTorch": [sys.executable, "-m", "tests.versions", "2.14.1", "--short"],
}


def main() -> int:
    """Run the stages that have not passed with these files; return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.all", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--anew", action="store_true", help="run the stages that have passed, too")
    anew = parser.parse_args().anew
    files = _files()
    passed: dict[str, float] = {} if anew else _passed_with(files)
    failed = []
    for stage, command in STAGES.items():
        if stage in passed:
            print(f"{stage}: passed before, in {passed[stage]:.0f} s", flush=True)
            continue
        began = time.monotonic()
        environment = {**os.environ, "WORLD_EXITS": "checked", "VIRTUAL_DEVICE_REQUIRED": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        seconds = time.monotonic() - began
        print(f"{stage}: {'failed' if ended.returncode else 'passed'} in {seconds:.0f} s", flush=True)
        if ended.returncode:
            failed.append(stage)
        else:
            passed[stage] = seconds
            DONE.write_text(json.dumps({"files": files, "passed": passed}), encoding="utf-8")
    print(f"failed: {', '.join(failed)}" if failed else f"all passed: {sum(passed.values()) / 60:.0f} minutes")
    return len(failed)


def _files() -> str:
    """Return a digest of the files that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    digest = hashlib.sha256()
    for name in sorted(listed.stdout.split(b"\0")):
        path = ROOT / os.fsdecode(name)
        digest.update(name + (path.read_bytes() if name and path.is_file() else b""))
    return digest.hexdigest()


def _passed_with(files: str) -> dict[str, float]:
    """Return the stages that passed with these files, and their seconds."""
    if not DONE.exists():
        return {}
    done = json.loads(DONE.read_text(encoding="utf-8"))
    return dict(done["passed"]) if done["files"] == files else {}


if __name__ == "__main__":
    sys.exit(main())
