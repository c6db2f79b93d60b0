"""The readers of NVML and nvidia-smi, and a driver that does not answer."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.devcluster.node_gpus import parse_query
from hopsgpu.gpu.node import devices, nvml
from hopsgpu.gpu.node import nvidia_smi as smi
from hopsgpu.gpu.node.devices import (
    DriverError,
    GpuDevice,
    GpuProcess,
    HungDriverError,
    Listing,
    ask_driver,
    list_devices,
    run_bounded,
)
from hopsgpu.gpu.node.health import HEALTHY, Readings
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until
from tests.unit import discovery_standins as standins
from tests.unit.discovery_standins import gpu, mig_device

NO_PERMISSION, LOST, RESET_REQUIRED, UNKNOWN = 4, 15, 16, 999


class Reader:
    """Both readers, in this process, on a simulated node."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._patch = monkeypatch
        standins.install(root / "bin")
        monkeypatch.setenv("STANDIN_GPUS", str(root / "node.json"))

    def play(
        self, gpus: list[dict[str, Any]], kernel: list[str] | None = None, **more: Any
    ) -> None:
        """Simulate a node. `kernel` has the bus ids that the kernel lists, by default those of all
        GPUs.
        """
        standins.play(self._root / "node.json", gpus, **more)
        buses = tuple(sorted(kernel if kernel is not None else [one["bus"] for one in gpus]))
        for module in (nvml, smi, devices):
            self._patch.setattr(module, "bus_ids", lambda: buses)

    def nvml(self) -> Listing:
        spec = importlib.util.spec_from_file_location("pynvml", standins.HERE / "pynvml.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return nvml.read(module)

    def smi(self, **environ: str) -> Listing:
        python = Path(sys.executable).parent
        path = {"PATH": f"{self._root / 'bin'}:{python}:/usr/bin:/bin"}
        return smi.read(path | environ, 60.0)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("told", "readings"),
    [
        ({"recovery": 4}, {"recovery_action": 4}),
        ({"ecc": [2, 5]}, {"volatile_double_bit": 2, "aggregate_double_bit": 5}),
        (
            {"rows": [1, 2, 1, 0]},
            {
                "remapped_correctable": 1,
                "remapped_uncorrectable": 2,
                "remap_pending": True,
                "remap_failed": False,
            },
        ),
        ({"rows": [0, 8, 0, 1]}, {"remap_pending": False, "remap_failed": True}),
        (
            {"retired": [3, 4], "retirement_pending": 1},
            {"retired_pages": 7, "retirement_pending": True},
        ),
        ({"clocks": 0x20}, {"sw_thermal": True, "hw_thermal": False, "hw_power_brake": False}),
        ({"clocks": 0xC0}, {"sw_thermal": False, "hw_thermal": True, "hw_power_brake": True}),
        ({"clocks": 0x40, "clocks_word": "throttle"}, {"hw_thermal": True}),
    ],
)
def test_both_tell_the_same(node: Reader, told: dict[str, Any], readings: dict[str, Any]) -> None:
    node.play([gpu(0, **told)])
    (by_nvml,) = node.nvml().devices
    (by_smi,) = node.smi().devices
    for device in (by_nvml, by_smi):
        said = device.readings._asdict()
        assert {key: said[key] for key in readings} == readings
    assert by_nvml == by_smi._replace(
        # NVML's is asked for by a call that the stand-in does not have
        readings=by_smi.readings._replace(sram_threshold_exceeded=None)
    )


def test_what_a_real_h100_answers_is_read(tmp_path: Path) -> None:
    """Recorded from driver 580.159.04, without serial numbers; NVML's answer there was the same."""
    answer = Path(__file__).parent / "answers" / "nvidia_smi_h100_580.xml"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat '{answer}'\n")
    tool.chmod(0o755)
    (device,) = smi.read({smi.VARIABLE: str(tool), "PATH": "/usr/bin:/bin"}, 60.0).devices
    assert device == GpuDevice(
        "GPU-00000000-1111-2222-3333-444444444444",
        "NVIDIA H100 80GB HBM3",
        81559,
        "580.159.04",
        Readings(
            recovery_action=0,
            volatile_double_bit=0,
            aggregate_double_bit=0,
            sram_threshold_exceeded=False,
            remapped_correctable=0,
            remapped_uncorrectable=0,
            remap_pending=False,
            remap_failed=False,
            hw_thermal=False,
            hw_power_brake=False,
            sw_thermal=False,
        ),
    )
    assert device.verdict.state == HEALTHY
    (listed,) = parse_query(answer.read_text())
    assert (listed.minor, listed.memory) == (0, device.memory_mib)


def test_a_gpu_that_tells_little_is_not_judged_by_it(node: Reader) -> None:
    """With an old driver, or a board without ECC: a missing reading is not a bad one."""
    bare = {key: gpu(0)[key] for key in ("bus", "uuid", "name", "mib")}
    node.play([bare | {"processes": [], "clocks": 0}])
    for listing in (node.nvml(), node.smi()):
        (device,) = listing.devices
        assert device.verdict.state == "healthy"
        assert device.readings.volatile_double_bit is None
        assert device.readings.remap_pending is None
        assert device.readings.recovery_action is None


def test_ecc_errors_before_ampere(node: Reader) -> None:
    node.play([{key: value for key, value in gpu(0, ecc_old=[2, 3]).items() if key != "ecc"}])
    (device,) = node.smi().devices
    assert (device.readings.volatile_double_bit, device.readings.aggregate_double_bit) == (2, 3)


def test_too_many_errors_of_sram(node: Reader) -> None:
    node.play([gpu(0, sram_threshold=True)])
    (device,) = node.smi().devices
    assert device.verdict.state == "bad"


@pytest.mark.parametrize("error", [LOST, RESET_REQUIRED])
def test_a_gpu_that_answers_with_an_error(node: Reader, error: int) -> None:
    node.play([gpu(0), gpu(1, error=error)])
    for listing in (node.nvml(), node.smi()):
        well, lost = listing.devices
        assert well.verdict.state == "healthy"
        assert (lost.address, lost.verdict.state) == (gpu(1)["uuid"], "bad")
        assert "GPU " in lost.verdict.reason


@pytest.mark.parametrize("new_words", [True, False])
def test_a_gpu_that_does_not_answer(node: Reader, new_words: bool) -> None:
    """The GPU is known by its bus id; some drivers' nvidia-smi then reports no other GPU either."""
    node.play([gpu(0), gpu(1, handle_error=UNKNOWN), gpu(2)], new_words=new_words)
    for listing in (node.nvml(), node.smi()):
        assert [one.address for one in listing.devices] == [
            gpu(0)["uuid"],
            "PCI-00000000:02:00.0",
            gpu(2)["uuid"],
        ]
        assert [one.verdict.state for one in listing.devices] == ["healthy", "bad", "healthy"]
        assert "Unknown Error" in listing.devices[1].verdict.reason
        assert not listing.is_isolated


def test_gpus_of_other_containers_are_not_shown(node: Reader) -> None:
    """With cgroups, NVML refuses these GPUs, and nvidia-smi leaves them out."""
    node.play([gpu(0, handle_error=NO_PERMISSION), gpu(1)])
    for listing in (node.nvml(), node.smi()):
        assert [one.address for one in listing.devices] == [gpu(1)["uuid"]]
        assert listing.is_isolated
    assert not node.smi(HOPSGPU_NVIDIA_SMI=str(node._root / "bin")).is_isolated


def test_processes_of_a_gpu_and_of_its_mig_devices(node: Reader) -> None:
    mine = {"pid": os.getpid(), "name": "python"}
    node.play([gpu(0, mig=[mig_device(0), mig_device(1, processes=[mine])])])
    assert [one.processes for one in node.smi().devices] == [
        (),
        (GpuProcess(os.getpid(), "python"),),
    ]
    node.play([gpu(0, processes=[mine, {"pid": 2**22 + 1, "name": "gone"}])])
    for listing in (node.nvml(), node.smi()):
        assert listing.devices[0].processes == (GpuProcess(os.getpid(), "python"),)


@pytest.mark.parametrize("pid", ["99999999999999999999999", "²", "0", "-1"])
def test_what_is_no_process(node: Reader, pid: str) -> None:
    node.play([gpu(0, processes=[{"pid": pid, "name": "odd"}])])
    (device,) = node.smi().devices
    assert device.processes == ()


def test_a_gpu_that_is_listed_twice_is_one(node: Reader) -> None:
    node.play([gpu(0), gpu(0)])
    listed = node.smi()
    assert len(listed.devices) == 1
    twice = Listing(listed.devices * 2)
    assert devices._decode(devices.encode(twice)).devices == listed.devices


def test_graphics_is_no_computing(node: Reader) -> None:
    node.play([gpu(0, processes=[{"pid": os.getpid(), "name": "Xorg", "type": "G"}])])
    assert node.smi().devices[0].processes == ()


def test_listings_survive_their_way(node: Reader) -> None:
    node.play([gpu(0, rows=[0, 1, 1, 0], processes=[{"pid": os.getpid(), "name": "é"}]), gpu(1)])
    listing = node.smi()
    assert devices._decode(json.loads(json.dumps(devices.encode(listing)))) == listing
    for error in (DriverError("a"), HungDriverError("b"), devices.NoDriverError("c")):
        with pytest.raises(type(error), match=str(error)):
            devices._decode(json.loads(json.dumps(devices.encode(error))))


@pytest.mark.parametrize(
    "text",
    [
        "raise RuntimeError('Python 2')",
        "print('hi', end='')",
        "import atexit; atexit.register(print, 'bye', end=''); raise ImportError('x')",
        "import atexit; atexit.register(print, '{bye'); raise ImportError('x')",
        "import atexit; atexit.register(print, '{}'); raise ImportError('x')",
        "import os; os.abort()",
    ],
)
def test_a_module_called_pynvml_that_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    with_modules(monkeypatch, tmp_path, pynvml=text)
    assert [one.address for one in list_devices(30.0).devices] == [gpu(0)["uuid"]]


def with_modules(monkeypatch: pytest.MonkeyPatch, root: Path, **modules: str) -> None:
    """A node with one GPU, and modules that are found before all others."""
    standins.install(root / "bin")
    standins.play(root / "node.json", [gpu(0)])
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{root}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_GPUS", str(root / "node.json"))


def test_garbage_whatever_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "import atexit; atexit.register(print, '{garbage')"
    with_modules(monkeypatch, tmp_path, sitecustomize=program)
    with pytest.raises(DriverError, match=": {garbage"):
        list_devices(30.0)


def test_the_time_is_for_all_that_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVML takes most of the time and crashes; nvidia-smi gets the rest."""
    program = "import os, time; time.sleep(6); os.abort()"
    with_modules(monkeypatch, tmp_path, pynvml=program)
    smi = tmp_path / "bin" / "nvidia-smi"
    started = tmp_path / "started"
    smi.write_text(f"#!/bin/sh\ndate +%s.%N > {started}\nsleep 600\n")
    began = time.monotonic()
    with pytest.raises(HungDriverError):
        ask_driver(8.0)
    assert time.monotonic() - began >= 7.5
    # Two of the eight seconds are left, fewer if NVML's program starts slowly.
    assert not started.exists() or time.time() - float(started.read_text()) < 7


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def hangs(command: list[str], seconds: float) -> tuple[int, str, str]:
        raise HungDriverError("the driver hangs")

    monkeypatch.setattr(devices, "run_bounded", hangs)
    yield


def test_the_kernels_gpus_where_the_driver_hangs(hung: None, node: Reader) -> None:
    node.play([gpu(0), gpu(1)])
    first, second = list_devices(1.0).devices
    assert (first.address, second.address) == ("PCI-00000000:01:00.0", "PCI-00000000:02:00.0")
    assert first.verdict == ("bad", "the driver hangs")
    node.play([], kernel=[])
    with pytest.raises(HungDriverError):
        list_devices(1.0)


def test_the_kernels_gpus_where_the_driver_fails(
    monkeypatch: pytest.MonkeyPatch, node: Reader
) -> None:
    """The libraries were upgraded, and the kernel module was not."""

    def fails(command: list[str], seconds: float) -> tuple[int, str, str]:
        error = DriverError("Driver/library version mismatch")
        return 0, json.dumps(devices.encode(error)), ""

    monkeypatch.setattr(devices, "run_bounded", fails)
    node.play([gpu(0)])
    (device,) = list_devices(1.0).devices
    assert device.address == "PCI-00000000:01:00.0"
    assert device.verdict == ("bad", "Driver/library version mismatch")
    node.play([], kernel=[])
    with pytest.raises(DriverError, match="version mismatch"):
        list_devices(1.0)


def test_no_driver_is_no_bad_gpu(monkeypatch: pytest.MonkeyPatch, node: Reader) -> None:
    """Waiting does not help if the container does not find nvidia-smi."""

    def none(command: list[str], seconds: float) -> tuple[int, str, str]:
        return 0, json.dumps(devices.encode(devices.NoDriverError("no nvidia-smi"))), ""

    monkeypatch.setattr(devices, "run_bounded", none)
    node.play([gpu(0)])
    with pytest.raises(devices.NoDriverError):
        list_devices(1.0)


def test_mig_devices_have_their_own_names(node: Reader) -> None:
    """With the name of a whole GPU they would seem larger than they are."""
    old = mig_device(1, uuid=f"MIG-{gpu(0)['uuid']}/1/0", profile="3g.40gb")
    gpus = [gpu(0, mig=[mig_device(0), old]), gpu(1)]
    names = ["H100 80GB HBM3 MIG 1g.20gb", "H100 80GB HBM3 MIG 3g.40gb", "H100 80GB HBM3"]
    for uuids in (True, False):
        node.play(gpus, mig_uuids=uuids)
        for listing in (node.nvml(), node.smi()):
            assert [one.name for one in listing.devices] == [f"NVIDIA {name}" for name in names]


def test_mig_devices_that_tell_no_name(node: Reader) -> None:
    node.play([gpu(0, mig=[mig_device(0, profile="")])])
    for listing in (node.nvml(), node.smi()):
        assert listing.devices[0].name.rstrip() == "NVIDIA H100 80GB HBM3 MIG"


def test_what_is_listed_here_as_on_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standins.install(tmp_path / "bin")
    standins.play(tmp_path / "node.json", [gpu(0)])
    monkeypatch.setenv("HOPSGPU_NVIDIA_SMI", str(tmp_path / "bin"))
    monkeypatch.setenv("STANDIN_GPUS", str(tmp_path / "node.json"))
    expected = GpuDevice(gpu(0)["uuid"], gpu(0)["name"], 81559, "550.54.15")
    (device,) = list_devices(30.0).devices
    assert device._replace(readings=Readings()) == expected


def test_a_program_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $! > {pids}; echo $$ >> {pids}; wait"
    with pytest.raises(HungDriverError, match="5 s"):
        run_bounded(["sh", "-c", command], 5.0)
    for pid in map(int, pids.read_text().split()):
        assert until(lambda pid=pid: gone(pid))


def test_a_program_that_cannot_be_killed_is_left(tmp_path: Path) -> None:
    """A program in the driver's uninterruptible sleep keeps the pipes: nobody may wait for it."""
    file = tmp_path / "pid"
    before = time.monotonic()
    with pytest.raises(HungDriverError):
        run_bounded(["sh", "-c", f"setsid sleep 600 & echo $! > {file}; sleep 600"], 5.0)
    assert time.monotonic() - before < HANG_SECONDS
    pid = int(file.read_text())
    assert not gone(pid)
    os.kill(pid, signal.SIGKILL)
