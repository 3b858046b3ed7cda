"""Train with compressed gradients on replicas that come and go: kill one and start it again; the others continue.

torchft_lighthouse --min_replicas 1 &
export TORCHFT_LIGHTHOUSE=http://localhost:29510
torchrun --standalone --nproc-per-node 1 torchft_ddp.py replica_0 &
torchrun --standalone --nproc-per-node 1 torchft_ddp.py replica_1
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from commhooks.integrations.torchft import compress

STEPS = 200


def main(replica: str) -> None:
    """Train one replica until the manager has counted all steps."""
    dist.init_process_group("gloo")  # of this replica alone
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=replica,
    )
    attachment = compress(model, "powersgd", manager, optimizers=[optimizer])
    while manager.current_step() < STEPS:
        inputs = torch.randn(128, 64)
        manager.start_quorum()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
        loss.backward()
        if manager.should_commit():
            optimizer.step()
    print(f"{replica}: loss {loss.item():.3f}, ratio {attachment.statistics().ratio:.1f}")
    attachment.close()
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
