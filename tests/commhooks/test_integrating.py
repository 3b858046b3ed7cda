"""What integrations with frameworks build on, without any framework."""

from __future__ import annotations

import pytest

from commhooks import AttachError, LoadRules, SettingsError
from commhooks.integrations import common
from tests.commhooks import integrating_in_worlds as ranks
from tests.world.launcher import run_world


def test_attach_finds_the_ddp_within_its_wrappers_and_the_parameters_in_its_buckets() -> None:
    run_world(ranks.finds_what_is_wrapped_and_what_comes_in_buckets, 1, check_exit=False)


def test_gathered_state_holds_all_ranks_and_resumes_bit_for_bit() -> None:
    run_world(ranks.gathers_what_every_rank_keeps, 2)


def test_an_optimizer_that_steps_without_the_hook_raises() -> None:
    run_world(ranks.notices_that_the_hook_did_not_run, 2, check_exit=False)


def test_metrics_are_what_was_counted_and_the_norms_of_what_is_kept() -> None:
    run_world(ranks.logs_what_it_costs, 2)


def test_a_framework_that_is_missing_or_too_old_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"needs no-such-framework: pip install 'commhooks\[lightning\]'"):
        common.require("no-such-framework", at_least="2.4", extra="lightning")
    with pytest.raises(ImportError, match=r"needs pytest 1000\.0 or newer \(found \d.*\): pip install"):
        common.require("pytest", at_least="1000.0", extra="lightning")
    common.require("pytest", at_least="8", extra="lightning")


def test_compression_refuses_early() -> None:
    with pytest.raises(SettingsError, match="policy must be one of"):
        common.Compression("CompressGradients", "powersgd", LoadRules(), policy="lifo")
    with pytest.raises(AttachError, match="CompressGradients: this run has one process"):
        common.Compression("CompressGradients", "powersgd", LoadRules()).begin(object())
