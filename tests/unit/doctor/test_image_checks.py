from __future__ import annotations

from dataclasses import replace

import pytest

from hopsgpu.cluster_managers.yarn.container_runtime import RuntimeProblem
from hopsgpu.doctor.image_checks import NAMES, check_containers, check_image
from hopsgpu.doctor.node_probe import ContainerFacts
from hopsgpu.doctor.report import Check
from tests.unit.doctor.test_checks import NODE

GOOD = ContainerFacts(
    shared_memory=2**33,
    open_files=65536,
    locked_memory=-1,
    uid=1000,
    user="alice",
    tokens="readable",
    hadoop_conf="/etc/hadoop/conf",
    has_hadoop_conf=True,
    has_host_network=True,
)


def checks(*containers: ContainerFacts) -> dict[str, Check]:
    facts = [
        replace(NODE, host=f"node{n}", container=container)
        for n, container in enumerate(containers, 1)
    ]
    return {check.name: check for check in check_containers(facts)}


def test_a_good_container_is_ok_in_each_check() -> None:
    result = checks(GOOD, GOOD)
    assert {name: check.state for name, check in result.items()} == dict.fromkeys(NAMES, "ok")
    assert result["shared memory"].seen == "/dev/shm of 8192 MiB on node1, node2"


@pytest.mark.parametrize(
    ("name", "change", "seen", "fix"),
    [
        (
            "shared memory",
            {"shared_memory": 2**26},
            "/dev/shm of 64 MiB on node2",
            "default-shm-size",
        ),
        ("shared memory", {"shared_memory": None}, "/dev/shm of 0 MiB", "default-shm-size"),
        ("limits", {"open_files": 1024}, "too few open files on node2", "default-ulimits"),
        ("network", {"has_host_network": False}, "node2", "default-container-network=host"),
        ("user", {"user": ""}, "no name for the container's user on node2", "/etc/passwd"),
        ("tokens", {"tokens": "unreadable"}, "cannot be read on node2", "application's user"),
        ("hadoop conf", {"has_hadoop_conf": False}, "/etc/hadoop/conf", "mount"),
    ],
)
def test_faults_name_the_node_and_what_to_do(
    name: str, change: dict[str, object], seen: str, fix: str
) -> None:
    check = checks(GOOD, replace(GOOD, **change))[name]  # type: ignore[arg-type]
    assert check.state == "wrong" and seen in check.seen and fix in check.fix, check


def test_limited_locked_memory_is_told_but_not_wrong() -> None:
    check = checks(replace(GOOD, locked_memory=65536))["limits"]
    assert check.state == "ok" and "64 KiB of locked memory" in check.seen
    assert "InfiniBand" in check.seen


def test_what_a_container_cannot_tell_is_unknown() -> None:
    result = checks(replace(GOOD, has_host_network=None, hadoop_conf=""))
    assert result["network"].state == "unknown"
    assert result["hadoop conf"].state == "ok" and "not set" in result["hadoop conf"].seen
    assert {check.state for check in check_containers([])} == {"unknown"}


def test_the_image_check_tells_which_nodes_do_not_start_it() -> None:
    problem = RuntimeProblem("allowed-runtimes=default: it must include docker", is_fatal=True)
    wrong = check_image("a/b", "docker", 2, {"node2": problem})
    assert wrong.state == "wrong" and wrong.seen == "a/b by docker: not on node2"
    assert wrong.details == (f"node2: {problem.text}",)
    assert check_image("a/b", "docker", 2, {}).state == "ok"
    assert check_image("a/b", "docker", 0, {}).state == "unknown"
