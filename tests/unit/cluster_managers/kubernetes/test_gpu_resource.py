"""The name of the resource that counts GPUs."""

from __future__ import annotations

import pytest

from hopsgpu.cluster_managers.kubernetes.gpu_resource import kubernetes_gpu_resource
from hopsgpu.errors import ConfigError

SETTING, VARIABLE = "spark.hopsgpu.gpu.resource", "HOPSGPU_GPU_RESOURCE"


def test_the_property_counts_before_the_variable() -> None:
    environ = {VARIABLE: "amd.com/gpu"}
    assert kubernetes_gpu_resource({}, {}) == "nvidia.com/gpu"
    assert kubernetes_gpu_resource({}, environ) == "amd.com/gpu"
    assert kubernetes_gpu_resource({SETTING: "a.com/b"}, environ) == "a.com/b"
    assert kubernetes_gpu_resource({SETTING: "  "}, environ) == "amd.com/gpu"


@pytest.mark.parametrize(
    "name", ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared", "example.com/GPU_a", "a/b"]
)
def test_names_of_extended_resources(name: str) -> None:
    assert kubernetes_gpu_resource({SETTING: f" {name} "}, {}) == name


@pytest.mark.parametrize(
    "name",
    ["gpu", "yarn.io/", "/gpu", "nvidia.com/gpu/0", "-a/b", "a/b c", "NVIDIA.com/gpu", "a/-"],
)
def test_other_names_are_refused_with_their_source(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{SETTING}='{name}'.*kubectl describe node"):
        kubernetes_gpu_resource({SETTING: name}, {})
    with pytest.raises(ConfigError, match=f"{VARIABLE}='{name}'"):
        kubernetes_gpu_resource({}, {VARIABLE: name})
