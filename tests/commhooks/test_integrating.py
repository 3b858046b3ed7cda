"""What integrations with frameworks build on, without any framework."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP

import commhooks
from commhooks import AttachError, SettingsError
from commhooks.exchange.metrics import write_to
from commhooks.integrations import common
from commhooks.integrations.common import Compression
from commhooks.saving.rank_files import load_rank_files, save_rank_files
from ddp_core import DistributedDataParallel
from tests.commhooks.resuming import distance
from tests.world import on_ranks

DDPS = (DistributedDataParallel, PyTorchDDP)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def powersgd() -> commhooks.Compressor:
    return commhooks.make_compressor("powersgd", rank=1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 16, generator=generator)).square().mean().backward()
    optimizer.step()


@on_ranks(1, check_exit=False)
def test_attach_finds_the_ddp_within_its_wrappers_and_the_parameters_in_its_buckets(rank: int) -> None:
    finds_what_is_wrapped(rank)
    knows_which_parameters_come_in_buckets(rank)
    keeps_nothing_for_sparse_gradients_after_the_model_is_gone(rank)


def finds_what_is_wrapped(rank: int) -> None:
    for ddp_class in DDPS:
        ddp = ddp_class(build())
        compiled = torch.compile(ddp, backend="eager")
        attachment = commhooks.attach(compiled, powersgd())  # type: ignore[arg-type]
        with pytest.raises(commhooks.AttachError, match="PowerSGD.* is attached to this model already"):
            commhooks.attach(ddp, powersgd())
        attachment.close()
        checkpointed = build()
        checkpointed[0] = checkpoint_wrapper(checkpointed[0])  # 'Module not indexable'
        inside = ddp_class(torch.compile(checkpointed, backend="eager"))  # type: ignore[arg-type]
        attachment = commhooks.attach(inside, powersgd())
        assert set(attachment.state.named()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        attachment.close()
        partly = build()
        partly[0].bias.requires_grad_(False)
        partly._ddp_params_and_buffers_to_ignore = ["2.bias"]  # type: ignore[assignment]  # "a Tensor or a Module"
        attachment = commhooks.attach(ddp_class(partly), powersgd())
        assert set(attachment.state.named()) == {"0.weight", "2.weight"}
        attachment.close()
        with pytest.raises(commhooks.AttachError, match="contains another DistributedDataParallel, 'module'"):
            commhooks.attach(PyTorchDDP(ddp), powersgd())
        twofold = nn.Sequential(ddp_class(build()), nn.Linear(16, 3))
        twofold._ddp_params_and_buffers_to_ignore = [name for name, _ in twofold.named_parameters() if name[0] == "0"]  # type: ignore[assignment]
        around = ddp_class(twofold)
        attachments = [commhooks.attach(one, powersgd()) for one in (around, twofold[0])]
        assert set(attachments[0].state.named()) == {"1.weight", "1.bias"}
        step(around, torch.optim.SGD(around.parameters(), lr=0.1), rank, 0)
        for attachment in attachments:
            assert attachment.steps == 1
            attachment.close()
    model = replicate(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = commhooks.attach(model, powersgd())
    step(model, optimizer, rank, 0)
    assert attachment.statistics().ratio > 2
    assert set(attachment.by_parameter()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    attachment.close()
    for wrong, named in (
        (build(), r"got Sequential\); wrap the model first"),
        (nn.DataParallel(build()), r"got DataParallel around Sequential"),
        (torch.compile(build(), backend="eager"), r"got OptimizedModule around Sequential"),
        (FullyShardedDataParallel(build(), device_id=torch.device("cpu")), "FullyShardedDataParallel .*shards its"),
        (fully_shard(build()), "FSDPSequential shards its parameters, so each rank holds only a part"),
        ("model", r"got str"),
    ):
        with pytest.raises(commhooks.AttachError, match=named):
            commhooks.attach(wrong, powersgd())  # type: ignore[arg-type]


@on_ranks(2, check_exit=False)
def test_gathered_state_holds_all_ranks_and_resumes_bit_for_bit(rank: int, tmp_path: Path) -> None:
    gathers_what_every_rank_keeps(rank)
    takes_no_damaged_file(rank, tmp_path)
    takes_no_file_of_another_save(rank, tmp_path)


def gathers_what_every_rank_keeps(rank: int) -> None:
    for to in (None, 0, 1):
        whole = _train(rank, steps=2, to=to)
        assert set(whole["local"]) == ({"rank0", "rank1"} if to in (None, rank) else {f"rank{rank}"})
    of_both: list[Any] = [None, None]
    dist.all_gather_object(of_both, _train(rank, steps=2, to=None))
    assert distance(of_both[0]["local"], of_both[1]["local"]) == 0
    assert distance(_train(rank, steps=2, to=None, then=2), _train(rank, steps=4, to=None)) == 0
    attachment = commhooks.attach(DistributedDataParallel(build()), powersgd())
    with pytest.raises(commhooks.CheckpointError, match=r"gathered\(to=2\): to must be a rank from 0 to 1, or None"):
        attachment.gathered(to=2)
    if rank == 1:
        attachment.state_dict = fails  # type: ignore[method-assign]
    for to in (None, 0):
        with pytest.raises(commhooks.CheckpointError, match="no state today"):
            attachment.gathered(to=to)
    attachment.close()


def fails() -> NoReturn:
    raise commhooks.CheckpointError("no state today")


def takes_no_damaged_file(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(build())
    attachment = commhooks.attach(model, powersgd())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0)
    save_rank_files(folder, "hook", attachment)
    file = folder / f"hook-rank{rank}.pt"
    held = file.read_bytes()
    residual = attachment.state_dict()["local"][f"rank{rank}"]["0.weight"]["residual"]
    at = held.index(residual.numpy().tobytes())
    if rank == 1:  # one bit of a residual
        file.write_bytes(held[:at] + b"\x01" + held[at + 1 :])
    with pytest.raises(commhooks.CheckpointError, match=r"hook-rank1\.pt is damaged: the checksum of .* is wrong"):
        load_rank_files(folder, "hook", attachment, commhooks.LoadRules())
    attachment.close()


def takes_no_file_of_another_save(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(build())
    attachment = commhooks.attach(model, "top-k")  # what it keeps differs on every rank: no rank can compare it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, rank, 0)
    save_rank_files(folder / "one", "hook", attachment)
    before = str(attachment.state_dict())
    save_rank_files(folder / "other", "hook", attachment)
    dist.barrier()
    if rank == 0:
        (folder / "other" / "hook-rank1.pt").replace(folder / "one" / "hook-rank1.pt")
    dist.barrier()
    for rules in (commhooks.LoadRules(), commhooks.LoadRules(settings="change", missing="reset", world_size="spread")):
        with pytest.raises(commhooks.CheckpointError, match=r"one holds files of different saves \(hook-rank0"):
            load_rank_files(folder / "one", "hook", attachment, rules)
    content = torch.load(folder / "one" / f"hook-rank{rank}.pt")
    (wide := folder / "wide").mkdir(exist_ok=True)
    for number in range(2 * rank, 2 + rank):  # of three ranks, the last of another save: each rank reads all of them
        own = {"local": {f"rank{number}": content["local"][f"rank{rank}"]}, "world_size": 3, "inventory": {}}
        torch.save(content | own | {"save": str(rank)}, wide / f"hook-rank{number}.pt")
    dist.barrier()
    with pytest.raises(commhooks.CheckpointError, match=r"wide holds files of different saves"):
        load_rank_files(wide, "hook", attachment, commhooks.LoadRules(world_size="spread"))
    assert str(attachment.state_dict()) == before
    dist.barrier()
    attachment.close()


def _train(rank: int, steps: int, to: int | None, then: int = 0) -> dict[str, Any]:
    """Train, and return the gathered state; with `then`, train on in another model that has loaded it."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = commhooks.attach(model, powersgd())
    for number in range(steps):
        step(model, optimizer, rank, number)
    state = attachment.gathered(to=to)
    attachment.close()
    if not then:
        return state
    resumed = DistributedDataParallel(build())
    resumed.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1)
    compression = Compression("Compression", powersgd())
    compression.load_state_dict(state)  # nothing is attached yet
    compression.begin(resumed, [optimizer])
    for number in range(steps, steps + then):
        step(resumed, optimizer, rank, number)
    assert compression.attachment is not None
    state = compression.attachment.gathered(to=to)
    compression.end()
    return state


def backward(model: nn.Module) -> float:
    loss = model(torch.ones(4, 16)).sum()
    loss.backward()
    return float(loss.detach())


@on_ranks(2, check_exit=False)
def test_an_optimizer_that_steps_without_the_hook_raises(rank: int) -> None:
    for ddp_class in DDPS:
        model = ddp_class(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = commhooks.attach(model, powersgd())
        attachment.watch(SimpleNamespace(optimizer=optimizer))  # as Accelerate and Lightning wrap theirs
        step(model, optimizer, rank, 0)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(
            commhooks.NotAveragedError, match="SGD is about to take a step on gradients of Sequential that were"
        ):
            step(model.module, optimizer, rank, 1)
        assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))
        with pytest.raises(commhooks.AttachError, match="none of the parameters of SGD belongs to the model"):
            attachment.watch(torch.optim.SGD(build().parameters(), lr=0.1))
        with pytest.raises(commhooks.AttachError, match="expected a torch.optim.Optimizer"):
            attachment.watch("sgd")
        attachment.close()
        with pytest.raises(commhooks.AttachError, match="watch: this attachment was closed"):
            attachment.watch(optimizer)
        attachment = commhooks.attach(model, "dgc")
        with_momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attachment.watch(with_momentum)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            step(model, with_momentum, rank, 4)
            step(model, with_momentum, rank, 5)
        assert sum("momentum is applied twice" in str(one.message) for one in heard) == (rank == 0)
        attachment.close()


def knows_which_parameters_come_in_buckets(rank: int) -> None:
    for ddp_class in DDPS:
        module = build()
        module[0].requires_grad_(False)
        model = ddp_class(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = commhooks.attach(model, powersgd())
        attachment.watch(optimizer)
        step(model, optimizer, rank, 0)
        module[0].requires_grad_(True)
        with pytest.raises(commhooks.NotAveragedError, match=r"'0\.weight' and 1 more on rank \d, .*it was frozen"):
            step(model, optimizer, rank, 1)
        attachment.close()


def keeps_nothing_for_sparse_gradients_after_the_model_is_gone(rank: int) -> None:
    model = PyTorchDDP(nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 16)))
    attachment = commhooks.attach(model, powersgd())
    model(torch.arange(4)).square().mean().backward()
    saved = attachment.state_dict()
    attachment.close()
    del model
    gc.collect()
    assert attachment.state_dict()["local"]["rank0"].keys() == saved["local"]["rank0"].keys() == {"1.weight"}


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    norm: Tensor = torch.cat([tensor.flatten() for tensor in tensors]).double().norm()
    return norm


@on_ranks(2)
def test_metrics_are_what_was_counted_and_the_norms_of_what_is_kept(rank: int) -> None:
    """The gradients are unscaled by then, and residuals are not."""
    model = DistributedDataParallel(build())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    attachment = commhooks.attach(model, powersgd(), scaler=scaler)
    assert attachment.metrics()["commhooks/bytes_sent_total"] == 0.0
    for number in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * number + rank))
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    counted, last = attachment.statistics(), attachment.last_step()
    residuals = {name: residual / 8 for name, _, residual in attachment.state.residuals()}
    gradients = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    ratio = "residual_norm_over_gradient_norm"
    expected: dict[str, Any] = {
        "bytes_sent_total": counted.moved_bytes,
        "bytes_sent_per_step": last.moved_bytes,
        "compression_ratio": last.ratio,
        "collectives_per_step": last.collectives,
        "seconds_compressing": last.seconds_compressing,
        "seconds_waiting": last.seconds_waiting,
        "seconds_exposed": last.seconds_exposed,
        ratio: _norm(residuals.values()) / _norm(gradients[name] for name in residuals),
        **{f"{ratio}/{name}": _norm([own]) / _norm([gradients[name]]) for name, own in residuals.items()},
        **{f"bytes_sent_total/{name}": of.moved_bytes for name, of in attachment.by_parameter().items()},
    }
    metrics = attachment.metrics(by_parameter=True)
    assert metrics == pytest.approx({f"commhooks/{name}": float(value) for name, value in expected.items()}, rel=1e-5)
    assert counted.moved_bytes == 3 * last.moved_bytes > 0 and metrics[f"commhooks/{ratio}"] > 0
    written: list[Any] = []
    attachment.log_to(lambda metrics, step: written.append((metrics, step)), 3)
    assert written == [(attachment.metrics(), 3)]
    with pytest.raises(commhooks.SettingsError, match="log_to: expected a writer"):
        attachment.log_to("tensorboard", 3)  # type: ignore[arg-type]
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none=set_to_none)
        assert not [name for name in attachment.metrics(by_parameter=True) if "residual_norm" in name]
    attachment.close()


def test_a_writer_of_tensorboard_gets_every_metric_and_a_logger_of_lightning_all_at_once() -> None:
    writer = Mock(spec=["add_scalar"])
    write_to(writer, {"a": 1.0, "b": 2.0}, 3)
    assert writer.mock_calls == [call.add_scalar("a", 1.0, 3), call.add_scalar("b", 2.0, 3)]
    logger = Mock(spec=["log_metrics"])
    write_to(logger, {"a": 1.0}, 3)
    assert logger.mock_calls == [call.log_metrics({"a": 1.0}, 3)]


def test_a_framework_that_is_missing_or_too_old_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"needs no-such-framework: pip install 'no-such-framework\[train\]>=2\.4'"):
        common.require("no-such-framework", at_least="2.4", extra="train")
    with pytest.raises(
        ImportError, match=r"needs pytest 1000\.0 or newer \(found \d.*\): pip install 'pytest>=1000\.0'"
    ):
        common.require("pytest", at_least="1000.0")
    common.require("pytest", at_least="8")


def test_compression_refuses_early() -> None:
    with pytest.raises(SettingsError, match="policy must be one of"):
        common.Compression("CompressGradients", "powersgd", policy="lifo")  # type: ignore[arg-type]  # '"Literal['lifo']"'
    misplaced: Any = {"rank": 2}
    with pytest.raises(SettingsError, match="unknown argument rank; settings of a compressor go to the compressor"):
        common.Compression("CompressGradients", "powersgd", **misplaced)
    with pytest.raises(AttachError, match="CompressGradients: this run has one process"):
        common.Compression("CompressGradients", "powersgd").begin(object())
