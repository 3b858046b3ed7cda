"""Adapters of the real PEFT: LoRA and DoRA in turn, a reference pass as DPO has it, a whole layer, and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from tests.commhooks.models import wrap
from tests.commhooks.ranks import of_every_rank
from tests.ddp_core.facts import BOTH_DDPS
from tests.frameworks.huggingface import differences, settle_in
from tests.world import run_world

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(120)]

ADAPTERS = ("low", "directed")


def adapted(*, lasting: bool = True) -> Any:
    """Return a tiny GPT-2 with two adapters, one of which also trains a copy of the last layer; all of them trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    shape = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**shape, **dropout, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    usual: dict[str, Any] = {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(**usual), "low")
    model.add_adapter("directed", LoraConfig(**usual, use_dora=True, modules_to_save=["lm_head"]))
    if lasting:
        model.set_requires_grad(ADAPTERS)
    return model


def words_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(64, (4, 1), generator=generator) + 3 * torch.arange(16)) % 64


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    words = words_of(rank, step)
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


class Run:
    """Training of the adapters in turn, in steps that also compute the loss without any, as DPO does."""

    def __init__(self, kind: str) -> None:
        self.model = adapted()
        self.ddp = wrap(kind, self.model, find_unused_parameters=True)
        self.hooks = commhooks.attach(self.ddp, "int8")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.hooks.watch(self.optimizer)

    def train(self, rank: int, steps: range) -> None:
        for step in steps:
            self.model.set_adapter(ADAPTERS[step % 2])
            loss = loss_of(self.ddp, rank, step)
            with torch.no_grad(), self.model.disable_adapter():
                reference = loss_of(self.ddp, rank, step)
            (loss - reference).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def adapters(self) -> dict[str, Any]:
        from peft import get_peft_model_state_dict

        return {name: get_peft_model_state_dict(self.model, adapter_name=name) for name in ADAPTERS}


def in_turn(rank: int, folder: str) -> None:
    from peft import set_peft_model_state_dict

    settle_in(rank)
    for kind in BOTH_DDPS:
        whole = Run(kind)
        whole.train(rank, range(3))
        state = {"adapters": whole.adapters(), "optimizer": whole.optimizer.state_dict()}
        torch.save(state | {"hooks": whole.hooks.state_dict()}, f"{folder}/{kind}-{rank}.pt")
        whole.train(rank, range(3, 8))

        resumed, state = Run(kind), torch.load(f"{folder}/{kind}-{rank}.pt")
        for name, adapter in state["adapters"].items():
            set_peft_model_state_dict(resumed.model, adapter, adapter_name=name)
        resumed.optimizer.load_state_dict(state["optimizer"])
        resumed.hooks.load_state_dict(state["hooks"])
        resumed.train(rank, range(3, 8))
        assert differences(whole.adapters(), resumed.adapters()) == []
        assert all(differences(whole.adapters(), other) == [] for other in of_every_rank(whole.adapters()))
        last = whole.hooks.last_step()
        trained = [p for name, p in whole.model.named_parameters() if any(f".{one}." in name for one in ADAPTERS)]
        assert last.gradient_bytes == 4 * sum(p.numel() for p in trained)
        assert last.moved_bytes < last.gradient_bytes / 3
        whole.hooks.close()
        resumed.hooks.close()


def test_adapters_in_turn_resume_bit_for_bit_from_what_is_saved_of_them_alone(tmp_path: Path) -> None:
    run_world(in_turn, 2, str(tmp_path), timeout=100)


def in_shards(rank: int) -> None:
    """Loss falls, whatever gathers the frozen base; of the adapters' gradients little is sent, of the base much."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    settle_in(rank)
    mesh = init_device_mesh("cpu", (2,))
    sent = {}
    for gather in ("fp32", "int8"):
        model = adapted(lasting=False)
        model.set_adapter("directed")
        for layer in (*model.get_base_model().transformer.h, model):
            fully_shard(layer, mesh=mesh)
        hooks = commhooks.attach_sharded(model, "int8", gather=gather)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        hooks.watch(optimizer)
        before = loss_of(model, rank, 0).item()
        for _ in range(10):
            with torch.no_grad(), model.disable_adapter():
                loss_of(model, rank, 0)
            loss_of(model, rank, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert loss_of(model, rank, 0).item() < 0.5 * before
        sent[gather] = hooks.gathers.statistics().moved_bytes
        reduced = hooks.statistics().moved_bytes - sent[gather]
        assert reduced < sent["fp32"] / 10
        hooks.close()
    assert 3.5 < sent["fp32"] / sent["int8"] < 4


def test_adapters_of_a_sharded_model_learn_with_a_reference_pass() -> None:
    run_world(in_shards, 2, timeout=100)
