"""One replica of a torchft run: `python -m tests.frameworks.torchft_replica <lighthouse> <name> <folder> <dies>`.

Replica "a" trains on whatever happens; "b" may die in the middle of a step. Once "a" has been alone and is not any
more, it says in a file after which step both are to end.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from commhooks import NotAveragedError
from commhooks.integrations.torchft import compress
from commhooks.tensors import cloned
from tests.commhooks.resuming import distance

DIES_AT, STEPS_TOGETHER = 5, 6


def main(lighthouse: str, name: str, folder: Path, dies: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("replica", store), rank=0, world_size=1)
    torch.manual_seed(ord(name))
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda state: _load(module, optimizer, state),
        state_dict=lambda: {"model": module.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        replica_id=f"replica_{name}",
    )
    attachment = compress(model, "powersgd", manager, optimizers=[optimizer])
    together, alone, undone, target = 0, 0, [], folder / "target"
    while not target.exists() or manager.current_step() < int(target.read_text()):
        manager.start_quorum()
        optimizer.zero_grad()
        before = _kept(attachment)
        if dies and together == DIES_AT:
            _die_in_backward(module)
        model(torch.randn(8, 64)).square().mean().backward()
        if manager.should_commit():
            optimizer.step()
        else:
            undone.append(distance(before, _kept(attachment)) == 0)
        together += manager.num_participants() == 2
        alone += together > 0 and manager.num_participants() == 1
        if name == "a" and alone and manager.num_participants() == 2 and not target.exists():
            (folder / "writing").write_text(str(manager.current_step() + STEPS_TOGETHER))
            (folder / "writing").rename(target)
    end = {
        "step": manager.current_step(),
        "model": {key: held.clone() for key, held in module.state_dict().items()},
        "shared": attachment.state_dict()["replicated"],
        "undone": undone,
        "alone": alone,
        "ratio": attachment.statistics().ratio,
        "bypassed": _bypass(module, optimizer),
    }
    torch.save(end, folder / f"{name}.pt")
    attachment.close()
    manager.shutdown()
    dist.destroy_process_group()


def _load(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _die_in_backward(module: nn.Module) -> None:
    """Let the process die as soon as the gradient of the first parameter is there."""
    first = next(module.parameters())
    first.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def _kept(attachment: Any) -> Any:
    return cloned([attachment.state_dict()[part] for part in ("replicated", "local")])


def _bypass(module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step on gradients that bypassed the hook raises."""
    module(torch.randn(8, 64)).square().mean().backward()
    try:
        optimizer.step()
    except NotAveragedError:
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "dies")
