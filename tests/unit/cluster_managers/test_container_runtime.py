from __future__ import annotations

import pytest

from hopsgpu.cluster_managers.yarn.container_runtime import (
    ALLOWED,
    EXECUTOR,
    runtime_problem,
    settings_of_runtime,
)

LINUX = "org.apache.hadoop.yarn.server.nodemanager.LinuxContainerExecutor"
NETWORK = "yarn.nodemanager.runtime.linux.docker.default-container-network"
GOOD = {EXECUTOR: LINUX, ALLOWED: "default, docker", NETWORK: "host"}


def test_the_properties_that_are_read() -> None:
    assert set(settings_of_runtime("docker")) == set(GOOD)


def test_a_node_that_allows_the_runtime_has_no_problem() -> None:
    assert runtime_problem("docker", GOOD, None) is None
    # Nothing is known of a NodeManager that does not tell its settings.
    assert runtime_problem("docker", {}, None) is None


@pytest.mark.parametrize(
    ("change", "network", "text", "is_fatal"),
    [
        ({EXECUTOR: "x.DefaultContainerExecutor"}, None, "must be LinuxContainerExecutor", True),
        ({ALLOWED: "default"}, None, "must include docker", True),
        ({NETWORK: "bridge"}, None, "'bridge'", False),
        ({}, "none", "'none'", False),
    ],
)
def test_problems(change: dict[str, str], network: str | None, text: str, is_fatal: bool) -> None:
    problem = runtime_problem("docker", {**GOOD, **change}, network)
    assert problem is not None and text in problem.text and problem.is_fatal == is_fatal


def test_a_requested_network_counts_before_the_nodes() -> None:
    assert runtime_problem("docker", {**GOOD, NETWORK: "bridge"}, "host") is None
