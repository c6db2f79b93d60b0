"""What a plan makes of the types of GPUs that nodes have."""

from __future__ import annotations

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.planning import nodes_with

MODELS = {
    "node1": ["NVIDIA A100-SXM4-40GB"],
    "node2": ["Tesla T4"],
    "node3": ["NVIDIA A100-SXM4-40GB", "Tesla T4"],
}


@pytest.mark.parametrize(
    ("gpu_type", "hosts"),
    [
        ("A100", {"node1", "node3"}),
        ("a100-sxm4", {"node1", "node3"}),
        ("tesla", {"node2", "node3"}),
    ],
)
def test_nodes_of_a_type(gpu_type: str, hosts: set[str]) -> None:
    assert nodes_with(gpu_type, MODELS, ["node4"]) == hosts


def test_a_type_that_no_node_has() -> None:
    with pytest.raises(ConfigError) as raised:
        nodes_with("H100", MODELS, ["node4"])
    assert str(raised.value) == (
        "gpu_type='H100': no node that this application can use has such a GPU. There are:"
        " 'NVIDIA A100-SXM4-40GB' on node1, node3; 'Tesla T4' on node2, node3; not told by node4"
    )


def test_no_node_with_gpus() -> None:
    with pytest.raises(ConfigError, match="There are: none$"):
        nodes_with("H100", {}, [])
