"""What integrations with frameworks build on, without any framework."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from commhooks import AttachError, ParameterTraffic, SettingsError, Statistics
from commhooks.hooks.metrics import metrics_of, write_to
from commhooks.integrations import common
from tests.commhooks import integrating_in_worlds as ranks
from tests.world.launcher import run_world


def test_attach_finds_the_ddp_within_its_wrappers_and_the_parameters_in_its_buckets() -> None:
    run_world(ranks.finds_what_is_wrapped_and_what_comes_in_buckets, 1, check_exit=False)


def test_gathered_state_holds_all_ranks_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    run_world(ranks.gathers_or_raises, 2, str(tmp_path), check_exit=False)


def test_an_optimizer_that_steps_without_the_hook_raises() -> None:
    run_world(ranks.notices_that_the_hook_did_not_run, 2, check_exit=False)


def test_metrics_are_what_was_counted_and_the_norms_of_what_is_kept() -> None:
    run_world(ranks.logs_what_it_costs, 2)


class Run:
    """The part of an engine that metrics are read from, with a loss scale of 8, and no two figures alike."""

    def __init__(self) -> None:
        self.ledger = self.loss_scale = self.state = self
        self.has_scaler = True

    def value(self) -> float:
        return 8.0

    def statistics(self) -> Statistics:
        return Statistics(moved_bytes=1, payload_bytes=2, collectives=3, seconds_exposed=4.0)

    def last_step(self) -> Statistics:
        return Statistics(5, 6, 7, 8, 9, 100, 11, 10, 13, 14.0, 15.0, 16.0)

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        return {"w": ParameterTraffic(moved_bytes=17, payload_bytes=18)}

    def named_residuals(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, gradient in (("w", torch.tensor([3.0])), ("v", torch.tensor([4.0])), ("sparse", None)):
            parameter = torch.zeros(1, requires_grad=True)
            parameter.grad = torch.zeros(1).to_sparse() if gradient is None else gradient
            yield name, parameter, torch.tensor([24.0 if name == "w" else 0.0])


def test_each_metric_is_its_own_figure_and_residuals_lose_the_loss_scale_of_gradients() -> None:
    run: Any = Run()
    ratio = "residual_norm_over_gradient_norm"
    expected = {
        "bytes_sent_total": 1,
        "bytes_sent_per_step": 13,
        "compression_ratio": 10,
        "collectives_per_step": 8,
        "seconds_compressing": 14,
        "seconds_waiting": 15,
        "seconds_exposed": 16,
        ratio: 3 / 5,
        f"{ratio}/w": 1,
        f"{ratio}/v": 0,
        "bytes_sent_total/w": 17,
    }
    assert metrics_of(run, by_parameter=True) == {f"commhooks/{name}": value for name, value in expected.items()}
    run.has_scaler = False
    assert metrics_of(run, by_parameter=False)[f"commhooks/{ratio}"] == 24 / 5


def test_a_writer_of_tensorboard_gets_every_metric_and_a_logger_of_lightning_all_at_once() -> None:
    writer = Mock(spec=["add_scalar"])
    write_to(writer, {"a": 1.0, "b": 2.0}, 3)
    assert writer.mock_calls == [call.add_scalar("a", 1.0, 3), call.add_scalar("b", 2.0, 3)]
    logger = Mock(spec=["log_metrics"])
    write_to(logger, {"a": 1.0}, 3)
    assert logger.mock_calls == [call.log_metrics({"a": 1.0}, 3)]


def test_a_framework_that_is_missing_or_too_old_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"needs no-such-framework: pip install 'commhooks\[lightning\]'"):
        common.require("no-such-framework", at_least="2.4", extra="lightning")
    with pytest.raises(ImportError, match=r"needs pytest 1000\.0 or newer \(found \d.*\): pip install"):
        common.require("pytest", at_least="1000.0", extra="lightning")
    common.require("pytest", at_least="8", extra="lightning")


def test_compression_refuses_early() -> None:
    with pytest.raises(SettingsError, match="policy must be one of"):
        common.Compression("CompressGradients", "powersgd", policy="lifo")
    misplaced: Any = {"rank": 2}
    with pytest.raises(SettingsError, match="unknown argument rank; settings of a compressor go to the compressor"):
        common.Compression("CompressGradients", "powersgd", **misplaced)
    with pytest.raises(AttachError, match="CompressGradients: this run has one process"):
        common.Compression("CompressGradients", "powersgd").begin(object())
