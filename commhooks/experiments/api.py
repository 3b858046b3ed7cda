"""A comparison in a script."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from commhooks.experiments.launch import WorldError, torchrun_world
from commhooks.experiments.links.text import DEFAULT_LINK
from commhooks.experiments.results.verdicts import Margins
from commhooks.experiments.screen import Screen
from commhooks.experiments.sweeps.output import dated_folder
from commhooks.experiments.sweeps.plan import plan
from commhooks.experiments.sweeps.store import FAILURES, table_of
from commhooks.experiments.sweeps.sweep import Sweep, make
from commhooks.experiments.sweeps.yaml_file import seeds_of

if TYPE_CHECKING:
    import pandas


def compare(
    tasks: Sequence[str],
    hooks: Sequence[str],
    *,
    links: Sequence[str] = (DEFAULT_LINK,),
    seeds: int | Sequence[int] = 3,
    ranks: int | Sequence[int] | None = None,
    device: str = "auto",
    steps: int | None = None,
    optimizers: Sequence[str | None] = (None,),
    compute: str | None = None,
    ddp: str = "core",
    bucket_cap_mb: float | None = None,
    evaluate_every: int = 20,
    go_on: int = 10,
    out: str | Path | None = None,
    overwrite: bool = False,
    baseline: str | None = None,
    target_loss: float | None = None,
    matters: float = 0.01,
    saves: float = 0.05,
    quiet: bool = False,
) -> pandas.DataFrame:
    """Train every task under every hook, over every link, with every seed, and return a table with a row for each run.

    Runs with a result in the folder are not run again, so calling this again continues an interrupted comparison. The
    folder receives the same report as from `commhooks compare`. Ranks are new processes, which import the script again:
    call this under `if __name__ == "__main__":`.

    Args:
        tasks: Names of tasks: 'digits', 'gpt:size=small', or functions of your own, 'folder/file.py:function'.
        hooks: Names of hooks, with settings: 'powersgd:rank=4'.
        links: Links between the ranks: '100Mbit/s', '1Gbit/s,latency=1ms', 'unlimited'.
        seeds: The number of seeds, from 0 on; or a list of seeds.
        ranks: The number of processes on this machine, or several numbers; None: 2, or torchrun's world size.
        device: 'cpu', 'cuda' (a GPU for each rank) or 'auto': a GPU if there is one.
        steps: Optimizer steps; None: each task's own number.
        optimizers: Optimizers as text: 'sgd:lr=0.1,momentum=0.9', 'adamw:lr=1e-3'; None: the task's own.
        compute: The time of a step's compute on the user's processor: '200ms', or '0.5x' of its time here.
        ddp: 'core' (ddp_core's class), 'torch' (PyTorch's), or 'sharded': FSDP2, with 'torch.none' for plain FSDP2.
        bucket_cap_mb: Bucket size in MiB; None: the DDP's own.
        evaluate_every: Steps between two evaluations.
        go_on: A run continues after its steps until it reaches the target or has used the baseline's training time, up
            to this many times the steps. 1: all runs end after the same number of steps.
        out: The folder of the results; None: runs/<date-time>.
        overwrite: Replace the results of an earlier comparison in that folder.
        baseline: The hook with which the others are compared; None: all-reduce if present, otherwise the first.
        target_loss: Training loss to reach; None: 95 % of the baseline's progress with the same seed.
        matters: A difference of losses matters above this fraction of what the baseline's loss falls.
        saves: A saving matters above this fraction of a step's time.
        quiet: Print nothing during the runs.

    Returns:
        The table that `load_table` returns, of these runs; under torchrun only on rank 0, and empty elsewhere.

    Raises:
        ValueError: Something requested does not exist or cannot work.
        RuntimeError: The call is not under `if __name__ == "__main__":`.
        WorldError: Some runs failed; the others are finished, and their results kept.

    """
    if torchrun_world() is None:
        _refuse_unguarded_call()
    runs = plan(
        tasks,
        hooks,
        links=links,
        seeds=seeds_of(seeds) if isinstance(seeds, int) else seeds,
        ranks=ranks if isinstance(ranks, Sequence) else [ranks],
        device=device,
        steps=steps,
        optimizers=optimizers,
        compute=compute,
        ddp=ddp,
        bucket_cap_mb=bucket_cap_mb,
        evaluate_every=evaluate_every,
    )
    folder = dated_folder() if out is None else Path(out)
    sweep = Sweep(
        runs=runs,
        out=folder,
        overwrite=overwrite,
        baseline=baseline,
        target_loss=target_loss,
        margins=Margins(matters=matters, saves=saves),
        go_on=go_on,
        command=shlex.join(["python", *sys.argv]),
        quiet=quiet,
    )
    made = make(sweep, Screen(quiet=quiet))
    if made.failures:
        raise WorldError(
            f"{len(made.failures)} of {len(runs)} runs failed; their tracebacks are in {folder / FAILURES}, and the "
            f"results of the others in load_table({str(folder)!r}). Calling compare again tries the failed ones again."
        )
    return table_of(list(made.results.values()))


def _refuse_unguarded_call() -> None:
    """Raise RuntimeError if the ranks, which import the script again, would make this call too."""
    hint = (
        "compare() starts processes that import this script again, and each would make this call again; put the call "
        'under `if __name__ == "__main__":`'
    )
    main = sys.modules["__main__"]
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    path = getattr(main, "__file__", None)
    package = getattr(main, "__spec__", None)
    if frame is None or path is None or (package is not None and package.name.endswith("__main__")):
        return  # a notebook, or `python -c`: nothing is imported again
    for statement in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        guards = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno) and not guards:
            raise RuntimeError(f"{path}, line {frame.f_lineno}: {hint}")
