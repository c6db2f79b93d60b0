"""The discovery script's file in a container, as the agent and the doctor read it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hopsgpu.control.peer import device_fields
from hopsgpu.gpu.container_gpus import (
    ContainerGpu,
    ContainerGpus,
    log_container_gpus,
    read_container_gpus,
)
from hopsgpu.gpu.node.devices import GpuDevice
from hopsgpu.gpu.node.discovery_script import CONTAINER_GPUS
from hopsgpu.gpu.node.health import Readings


def test_nothing_is_given_where_the_script_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        read_container_gpus()
        == read_container_gpus(tmp_path)
        == ContainerGpus((), is_isolated=False)
    )
    assert device_fields() == []


def test_file_of_the_script_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        GpuDevice("GPU-1", "NVIDIA A100", 81559, "550.54", Readings(remap_pending=True)),
        GpuDevice("GPU-2", "Simulated A100", 40960, "550.54", Readings("it is lost")),
    ]
    said = {"gpus": [device.as_json() for device in devices], "isolated": True}
    (tmp_path / CONTAINER_GPUS).write_text(json.dumps(said))
    given = read_container_gpus(tmp_path)
    watched, bad = given.gpus
    assert watched.state == "watch" and "a row remapping is pending" in watched.reason
    assert bad == ContainerGpu("GPU-2", "Simulated A100", "550.54", "bad", "it is lost")
    assert given.is_isolated and given.simulated_addresses == {"GPU-2"}
    monkeypatch.chdir(tmp_path)
    known = {"driver": "550.54", "parent": ""}
    assert device_fields() == [
        {"gpu": "GPU-1", "model": "NVIDIA A100", "bad": "", **known},
        {"gpu": "GPU-2", "model": "Simulated A100", "bad": "it is lost", **known},
    ]


def test_choice_of_the_discovery_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.gpu")
    healthy = ContainerGpu("GPU-1", "NVIDIA A100", "550.54", "healthy", "")
    log_container_gpus(ContainerGpus((healthy, ContainerGpu("GPU-2", "", "", "bad", "it is lost"))))
    first, second = caplog.messages
    assert all(fact in first for fact in ("GPU-1", "NVIDIA A100", "550.54", "healthy"))
    assert "GPU-2" in second and second.endswith("bad: it is lost")
