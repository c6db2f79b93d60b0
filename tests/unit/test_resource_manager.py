"""The ResourceManager's REST: addresses from Hadoop's settings, and what is read of nodes.

The answers are those of a real one, shortened; the cluster tests ask a real one.
"""

from __future__ import annotations

import pytest

from hopsgpu.errors import CapacityError, HopsGpuError
from hopsgpu.yarn.amounts import Amount
from hopsgpu.yarn.capacity import check_container, cores_per_gpu
from hopsgpu.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.yarn.snapshot import Node


@pytest.mark.parametrize(
    ("settings", "addresses"),
    [
        ({"webapp.address": "rm:8088"}, ("http://rm:8088",)),
        ({"hostname": "rm"}, ("http://rm:8088",)),
        (
            {"hostname": "rm", "webapp.address": "${yarn.resourcemanager.hostname}:8088"},
            ("http://rm:8088",),
        ),
        ({"http": "HTTPS_ONLY", "webapp.https.address": "rm:8090"}, ("https://rm:8090",)),
        (
            {
                "ha.enabled": "true",
                "ha.rm-ids": "a, b",
                "webapp.address.a": "one:8088",
                "hostname.b": "two",
            },
            ("http://one:8088", "http://two:8088"),
        ),
        ({}, ()),
    ],
)
def test_web_addresses(settings: dict[str, str], addresses: tuple[str, ...]) -> None:
    full = {f"yarn.resourcemanager.{k}": v for k, v in settings.items() if k != "http"}
    if "http" in settings:
        full["yarn.http.policy"] = settings["http"]
    assert web_addresses(full.get) == addresses


def node(cores: int, gpus: int, state: str = "RUNNING") -> Node:
    return Node("n:1", "n", state, Amount(gpus, cores, 1024), Amount(0, 0, 0))


def test_the_share_of_cores_is_that_of_the_poorest_node() -> None:
    assert cores_per_gpu((node(16, 2), node(9, 4), node(64, 0))) == 1
    assert cores_per_gpu((node(16, 2), node(2, 2, "LOST"))) == 7
    assert cores_per_gpu((node(1, 4),)) == 1
    assert cores_per_gpu(()) == 1


def test_a_container_that_fits_nowhere_names_the_bounds() -> None:
    nodes = (node(8, 2), node(64, 8, "LOST"))
    largest = Amount(8, 32, 2048)
    check_container(Amount(2, 8, 1024), largest, nodes)
    for wanted in (Amount(4, 8, 1024), Amount(2, 9, 1024), Amount(2, 8, 1025)):
        with pytest.raises(CapacityError, match=r"node n has 2 GPUs, 8 cores, 1024 MiB") as error:
            check_container(wanted, largest, nodes)
        assert str(wanted) in str(error.value)
    with pytest.raises(CapacityError, match="largest container has 1 GPUs"):
        check_container(Amount(2, 8, 1024), Amount(1, 32, 2048), nodes)


@pytest.mark.parametrize("addresses", [(), ("http://127.0.0.1:1",)])
def test_no_answer_says_where_it_was_asked(addresses: tuple[str, ...]) -> None:
    with pytest.raises(HopsGpuError, match="HADOOP_CONF_DIR") as error:
        ResourceManager(addresses).nodes()
    assert all(address in str(error.value) for address in addresses)
