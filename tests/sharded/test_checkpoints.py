"""State of a sharded model's compressors in checkpoints of torch.distributed.checkpoint, with other ranks too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import commhooks
from tests.commhooks.ranks import of_every_rank
from tests.commhooks.told import told_by
from tests.sharded.models import sgd, sharded, train
from tests.world import run_world


def went_on(rank: int, folder: Path, step: int, before: str | None) -> dict[str, float]:
    """Resume from the checkpoint of so many steps, if any, train three steps on, and save; return what is kept."""
    model = sharded()
    optimizer = sgd(model)
    attachment = commhooks.attach_sharded(model, "int4")
    whole_only = told_by(lambda: commhooks.save_checkpoint(folder / "plain", step=0, model=model, hooks=attachment))
    assert whole_only.error == "CheckpointError" and "with torch.distributed.checkpoint.save" in whole_only.text
    if before is not None:
        parameters = model.state_dict()
        load({"model": parameters}, checkpoint_id=folder / before)
        model.load_state_dict(parameters)
        refused = told_by(lambda: commhooks.load_distributed(folder / before, attachment))
        assert refused.error == "CheckpointError" and "world_size='spread'" in refused.text
        commhooks.load_distributed(folder / before, attachment, world_size="spread-mean")
        assert attachment.steps == step
    kept = {"loaded": total_of(attachment)}
    train(model, optimizer, rank, step, step + 3)
    kept["saved"] = total_of(attachment)
    save({"model": model.state_dict(), "hooks": attachment.state_dict()}, checkpoint_id=folder / str(step + 3))
    whole = {name: full(value) for name, value in model.state_dict().items()}
    kept["weights"] = float(sum(value.double().abs().sum() for value in whole.values()))
    attachment.close()
    return kept


def total_of(attachment: commhooks.Handle[Any]) -> float:
    """Return the sum of what all ranks have not sent, with signs that tell elements apart, over the ranks."""
    total = 0.0
    for label, group in attachment.state_dict()["groups"].items():
        for entries in group["local"][f"rank{dist.get_rank()}"].values():
            residual = entries["residual"].double().flatten()
            weights = torch.cos(torch.arange(len(residual), dtype=torch.float64) + len(label))
            total += float((residual * weights).sum())
    return float(sum(of_every_rank(total))) / dist.get_world_size()


def full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_with_other_ranks_nothing_that_is_owed_is_lost(tmp_path: Path) -> None:
    """Three ranks, two, and four; what is owed is the mean of residuals over the ranks."""
    saved = None
    for number, ranks in enumerate((3, 2, 4)):
        found = run_world(went_on, ranks, tmp_path, 3 * number, str(3 * number) if number else None)
        for one in found:
            assert one == found[0]
            assert saved is None or abs(one["loaded"] - saved) < 1e-5 * abs(saved), (ranks, one, saved)
        saved = found[0]["saved"]
        assert saved != 0
