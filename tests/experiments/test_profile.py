"""Profiles: what is measured in real ranks, what they leave as it was, and what is made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer

import commhooks
import ddp_core
from commhooks.experiments import planning
from commhooks.experiments.planning import Profile
from commhooks.experiments.planning.candidates import Candidate, named
from commhooks.experiments.planning.errors import ProfileError
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts
from tests.world import run_world

facts = Facts()
CLASSES: dict[str, Any] = {"core": ddp_core.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}
CANDIDATES = [
    named("int8"),
    named("powersgd", rank=1),
    named("top-k", policy="fused", ratio=0.1),
    named("powersgd", policy="fused", rank=1),
]
"""Hooks of one round and of two, with sums, gathers and exchanges, under both policies."""


class Training:
    """A small model in its DDP; `step` takes a step, and fails in the one asked for."""

    def __init__(self, ddp: str, fails_in: int = -1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.ddp = CLASSES[ddp](self.model, bucket_cap_mb=0.0005)  # several buckets
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.taken, self.fails_in = 0, fails_in

    def step(self) -> None:
        self.taken += 1
        if self.taken == self.fails_in:
            raise LookupError("the data is gone")
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, 8)).square().sum().backward()
        self.optimizer.step()

    def contents(self) -> list[Tensor]:
        """Return copies of all that a profile must leave as it is."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kept = [*self.model.parameters(), *(p.grad for p in self.model.parameters()), *states]
        return [one.detach().clone() for one in kept if one is not None]

    def profile(self, **changes: Any) -> Profile:
        asked: dict[str, Any] = {"step_fn": self.step, "hooks": (), "steps": 3}
        return planning.profile(self.ddp, **asked | changes)

    def installed(self) -> list[int]:
        """Count the hooks of the kinds that a profile installs, those of the DDP too."""
        return [
            torch.autograd.backward.__module__ != "torch.autograd",
            len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks),
            sum(len(p._post_accumulate_grad_hooks or ()) for p in self.model.parameters()),
            len(self.ddp._forward_pre_hooks) + len(self.ddp._forward_hooks),
        ]

    def stays_as_it_is(self, act: Callable[[], Any]) -> Any:
        """Return what a call returns that leaves everything as it was."""
        before, own = self.contents(), self.installed()
        found = act()
        assert all(torch.equal(*pair) for pair in zip(before, self.contents(), strict=True))
        assert self.installed() == own, "nothing stays installed"
        return found

    def sent(self, candidate: Candidate) -> dict[str, int]:
        """Return the payload of one real step, by the kind of collective, as its communicator counts it."""
        attachment = commhooks.attach(self.ddp, candidate.compressor, policy=candidate.policy)
        self.step()
        counts = {kind: found.payload_bytes for kind, found in attachment.statistics().by_kind.items()}
        attachment.close()
        return counts


Measured = tuple[Profile, dict[str, dict[str, int]]]


def profiled(rank: int, ddp: str) -> Measured:
    """Profile after a first step; return the profile, and what real steps send."""
    training = Training(ddp)
    training.step()
    found: Profile = training.stays_as_it_is(lambda: training.profile(hooks=CANDIDATES))
    return found, {one.label: training.sent(one) for one in CANDIDATES}


@pytest.fixture(scope="module", params=["core", "torch"])
def measured(request: pytest.FixtureRequest) -> Measured:
    first: Measured
    first, second = run_world(profiled, 2, request.param)
    assert first[0] == second[0], "on all ranks"
    return first


def test_a_profile_has_all_hooks_and_parts_add_up_to_the_step(measured: Measured) -> None:
    found, _ = measured
    assert set(found.hooks) == {one.label for one in CANDIDATES} | {"noop", "allreduce"}
    assert (found.ranks, found.plain.steps, found.noop.steps) == (2, 3, 3)
    for step in (found.plain, *(hook.step for hook in found.hooks.values())):
        parts = step.forward, step.backward, step.exposed, step.optimizer
        assert sum(parts) == pytest.approx(step.seconds.median)
        assert min(parts) > 0
        assert step.seconds.low <= step.seconds.median <= step.seconds.high


def test_rounds_send_what_the_communicator_counts_in_a_real_step(measured: Measured) -> None:
    found, real = measured
    for label, counted in real.items():
        expected: Counter[str] = Counter()
        for bucket in found.hooks[label].buckets:
            for one in bucket.rounds:
                expected.update(dict(one.sends))
        assert expected.keys() == counted.keys()
        for kind, payload in counted.items():
            # A message of several parts ends at a multiple of its widest element, of 4 bytes here.
            room = 3 if kind == "all-gather" and label.startswith("top-k") else 0
            assert expected[kind] <= payload <= expected[kind] + room, (label, kind)


def test_gradients_and_buckets_are_ready_in_order_within_the_step(measured: Measured) -> None:
    found, _ = measured
    gradients = [gradient.ready for gradient in found.gradients]
    assert len(gradients) == 6 and gradients[0] > 0 and gradients == sorted(gradients)
    names = sorted(gradient.name for gradient in found.gradients)
    for hook in found.hooks.values():
        assert sorted(name for bucket in hook.buckets for name in bucket.parameters) == names
        assert all(one.seconds > 0 for bucket in hook.buckets for one in bucket.rounds)
    assert not any(bucket.rounds for bucket in found.hooks["noop"].buckets)
    assert len(found.hooks["noop"].buckets) > 1


def test_state_is_that_of_each_hook_alone(measured: Measured) -> None:
    hooks, matrices = measured[0].hooks, 8 * 16 + 16 * 16 + 16 * 4
    assert hooks["noop"].state_bytes == hooks["allreduce"].state_bytes == 0
    assert hooks["top-k:policy=fused,ratio=0.1"].state_bytes == 4 * (matrices + 16 + 16 + 4)
    bases = hooks["powersgd:rank=1"].state_bytes - 4 * matrices
    assert 4 * (8 + 16 + 4) <= bases <= 4 * (16 + 16 + 16)  # a column of Q for each matrix, on either side


@facts
def a_step_that_fails_on_one_rank_ends_the_profile_on_all(rank: int) -> None:
    for step in (1, 9):  # the first one, and one under a hook
        training = Training("core", fails_in=step if rank == 1 else -1)
        told = training.stays_as_it_is(partial(told_by, training.profile))
        assert told.error == "ProfileError" and told.text.startswith("could not take a ")
        assert "rank 1: LookupError: the data is gone" in told.text


@facts
def what_cannot_be_profiled_is_refused_in_words(rank: int) -> None:
    training = Training("core")
    inner = torch.ones(1, 8)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"steps": 2}, r"profile(steps=2): steps must be a whole number of at least 3"),
        ({"seconds": 0.0}, "profile(seconds=0.0): seconds must be above zero"),
        ({"as_ranks": 1}, "profile(as_ranks=1): as_ranks must be a whole number, at least the 2"),
        ({"seconds": 1e-6, "steps": None}, "profile: 3 steps of each of 2 hooks do not fit into the time"),
        ({"step_fn": lambda: training.model(inner).sum().backward()}, "profile: no gradient passed through the hook"),
        ({"step_fn": lambda: training.model(inner)}, "ran no backward pass"),
        ({"hooks": (named("fp16"), named("fp16"))}, "profile: hook 'fp16' is given twice"),
        ({"steps": 3 + rank}, "profile: ranks disagree about steps or hooks; by rank: steps=3, "),
    ]
    for changes, words in refusals:
        told = told_by(partial(training.profile, **changes))
        assert words in told.text, told
    attachment = commhooks.attach(training.ddp, "fp16")
    assert told_by(training.profile).error == "AttachError"
    attachment.close()


test = facts.tests()


def test_a_profile_survives_json_and_what_is_none_is_refused(measured: Measured, tmp_path: Path) -> None:
    found, path = measured[0], tmp_path / "profile.json"
    found.write(path)
    assert Profile.read(path) == found
    raw = json.loads(path.read_text())
    damages: list[dict[str, object]] = [{"format": 99}, {"ranks": "two"}, {"gradients": 3}, {"noop": {}}, {"more": 1}]
    for damage in damages:
        path.write_text(json.dumps(raw | damage))
        with pytest.raises(ProfileError, match="expected a file of format 1"):
            Profile.read(path)
    with pytest.raises(ProfileError, match="FileNotFoundError"):
        Profile.read(tmp_path / "nothing.json")
