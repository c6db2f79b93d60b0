"""The GPUs that a standalone master assigned, as the node's driver lists them."""

from __future__ import annotations

from hopsgpu.gpu.node.devices import GpuDevice, Listing
from hopsgpu.gpu.node.discovery_script import select_assigned

LISTING = Listing((GpuDevice("GPU-a"), GpuDevice("GPU-b")))


def test_uuids_and_numbers_name_the_devices_of_the_driver() -> None:
    devices = select_assigned(LISTING, ["GPU-b", "0"]).devices
    assert [device.address for device in devices] == ["GPU-b", "GPU-a"]


def test_an_unlisted_device_is_bad_and_keeps_its_address() -> None:
    devices = select_assigned(LISTING, ["GPU-c", "MIG-d", "7"]).devices
    assert [device.address for device in devices] == ["GPU-c", "MIG-d", "GPU-7"]
    assert {device.verdict.state for device in devices} == {"bad"}
