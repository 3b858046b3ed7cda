"""The choice of a device and of a backend, which needs no device."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.experiments.devices import NCCL, backend_for, chosen
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.machine import trained_on
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.sweeps.yaml_file import read_sweep

GPUS: dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(tmp_path: Path) -> None:
    assert chosen("auto") == chosen(None) == "cpu"
    with pytest.raises(
        ValueError, match=r"device 'cuda': there is no GPU for use here.*leave --device out to train on"
    ):
        chosen("cuda")
    with pytest.raises(ValueError, match="device 'gpu' is not known: expected cpu, cuda or auto"):
        chosen("gpu")
    (file := tmp_path / "sweep.yaml").write_text("task: digits:size=tiny\nsteps: 2\ndevice: auto\n")
    assert [run.device for run in read_sweep(file).runs] == ["cpu"]
    file.write_text("task: digits:size=tiny\nsteps: 2\ndevice: [cpu, cuda]\n")
    with pytest.raises(ValueError, match="there is no GPU for use here"):
        read_sweep(file)
    assert [run.device for run in read_sweep(file, "cpu").runs] == ["cpu"]  # the command's replaces the file's


@pytest.mark.parametrize(
    ("device", "link", "ranks", "backend"),
    [
        ("cuda", "unlimited", 2, NCCL),
        ("cuda", "real", 2, NCCL),
        ("cuda", "real", 3, "gloo"),
        ("cuda", "1Gbit/s", 2, "gloo"),
        ("cuda", "latency=1ms", 2, "gloo"),
        ("cuda", "hosts:1Gbit/s", 2, "gloo"),
        ("cpu", "real", 2, "gloo"),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_of_their_own_and_links_that_nobody_slows(
    device: str, link: str, ranks: int, backend: str
) -> None:
    with mock.patch.multiple(torch.cuda, **GPUS):
        assert backend_for(device, LinkSettings.parse(link), ranks) == backend


def test_runs_on_different_devices_have_other_scenes_keys_and_words() -> None:
    one, other = (RunSettings.from_dict({"task": "digits", "device": device}) for device in ("cpu", "cuda"))
    assert one.scene != other.scene and one.key != other.key
    assert "device" not in one.to_dict()  # so that results of earlier versions keep their names
    assert trained_on({"backend": "gloo"}, is_limited=True) == "It trains on the CPU, over Gloo."
    on_gpu = trained_on({"device": "H200", "backend": "gloo"}, is_limited=True)
    assert on_gpu == "It trains on H200, over Gloo: the emulation of a link waits on the host, for which NCCL does not."
