"""GPU types, the nodes that have them, and the resources that mark these nodes."""

from __future__ import annotations

import pytest

from hopsgpu.core.gpu_names import has_type, may_have_type
from hopsgpu.core.gpu_types import hosts_of_whole_gpus, marker_of, nodes_with, parse_markers
from hopsgpu.errors import ConfigError

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
        "gpu_type='H100': no node that this application can use has such a GPU. Available:"
        " 'NVIDIA A100-SXM4-40GB' on node1, node3; 'Tesla T4' on node2, node3; not"
        " reported by node4"
    )


def test_no_node_with_gpus() -> None:
    with pytest.raises(ConfigError, match="Available: none$"):
        nodes_with("H100", {}, [])


@pytest.mark.parametrize(
    ("model", "wanted", "is_one"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100", True),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4", True),
        ("NVIDIA A100-SXM4-40GB", "A100-PCIE", False),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", True),
        ("NVIDIA A100-SXM4-40GB", "40GB A100", False),
        ("NVIDIA A100-SXM4-40GB", "a100sxm4", True),
        ("NVIDIA GeForce RTX 3090", "RTX3090", True),
        ("NVIDIA GeForce RTX 3090", "RTX309", False),
        # Other products, whose names begin with the letters of the wanted one.
        ("NVIDIA RTX A1000", "A100", False),
        ("NVIDIA A100-SXM4-40GB", "A10", False),
        ("NVIDIA L40S", "L4", False),
        ("NVIDIA GH200 480GB", "H200", False),
        ("NVIDIA GeForce RTX 4090", "rtx 4090", True),
        ("", "A100", False),
        # A slice is asked for as one.
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100", False),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "mig 1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100 1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "H100 1g.5gb", False),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.10gb", False),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "mig", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", "1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb", "2g.10gb", False),
        ("NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb", "1c.2g.10gb", True),
        ("NVIDIA A100-SXM4-40GB (MIG)", "A100", False),
        ("NVIDIA A100-SXM4-40GB", "-", False),
    ],
)
def test_words_of_a_product_name(model: str, wanted: str, is_one: bool) -> None:
    assert has_type(model, wanted) is is_one


@pytest.mark.parametrize(
    ("model", "wanted", "may_be"),
    [
        ("NVIDIA A100-SXM4-40GB (MIG)", "1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB (MIG)", "a100 1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB (MIG)", "h100 1g.5gb", False),
        ("NVIDIA A100-SXM4-40GB (MIG)", "A100", False),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "3g.20gb", False),
        ("NVIDIA A100-SXM4-40GB", "1g.5gb", False),
        ("NVIDIA A100-SXM4-40GB", "A100", True),
    ],
)
def test_names_that_lack_the_profile(model: str, wanted: str, may_be: bool) -> None:
    assert may_have_type(model, wanted) is may_be


def test_nodes_for_ranks_with_several_gpus() -> None:
    models = {"a": ["A100 MIG 1g.5gb"], "b": ["A100"], "c": ["A100", "A100 MIG 1g.5gb"], "d": []}
    assert hosts_of_whole_gpus(models, ["e"], 2) == {"b", "c", "d", "e"}
    assert hosts_of_whole_gpus({"b": ["A100"]}, [], 2) is None
    with pytest.raises(ConfigError, match=r"gpus_per_worker=2: .*on a.*gpus_per_worker=1"):
        hosts_of_whole_gpus({"a": ["A100 (MIG)"]}, [], 2)


def test_markers() -> None:
    assert parse_markers(None) == parse_markers("") == {}
    markers = parse_markers("A100=gpu-a100, A100 SXM4=example.com/gpu-sxm ,T4=gpu-t4")
    assert markers == {"A100": "gpu-a100", "A100 SXM4": "example.com/gpu-sxm", "T4": "gpu-t4"}
    assert marker_of("a100", markers) == "gpu-a100"
    assert marker_of("A100-sxm4-40GB", markers) == "example.com/gpu-sxm"
    assert marker_of("A10", markers) is None


@pytest.mark.parametrize(
    "given", ["A100", "=x", "A100=", "-=x", "A=b c", "A=vcores", "A=yarn.io/gpu"]
)
def test_what_is_no_marker(given: str) -> None:
    with pytest.raises(ConfigError, match="must be TYPE=RESOURCE"):
        parse_markers(f"T4=gpu-t4,{given}")
