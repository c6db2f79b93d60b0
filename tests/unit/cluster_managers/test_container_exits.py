from __future__ import annotations

import re

import pytest

from hopsgpu.cluster_managers.yarn.container_exits import container_exit, explain_exit

# As Spark logs it: YARN's diagnostics of a container that container-executor could not start.
FRAME = """Container from a bad node: container_1_01_000002 on host: node1. Exit status: 29. \
Diagnostics: [2026-11-30 11:52:02.112]Exception from container-launch.
Container id: container_1_01_000002
Exit code: 29
Exception message: Launch container failed
Shell error output: {}

[2026-11-30 11:52:02.112]Container exited with a non-zero exit code 29.
"""
MOUNT = "Configuration does not allow docker mount '/home:/home:ro', realpath=/home"
UNTRUSTED = """image: evil/x:1 is not trusted.
Invalid param 'nvidia' requested
Could not find requested runtime in allowed runtimes"""
PULL = """Unable to find image 'local/x:1' locally
docker: Error response from daemon: manifest for local/x:1 not found: manifest unknown."""


@pytest.mark.parametrize(
    ("output", "reason", "remedy"),
    [
        (
            "Requested runtime not allowed.",
            "does not allow containers in images",
            "allowed-runtimes",
        ),
        (UNTRUSTED, "registry of the image evil/x:1 is not trusted", "docker.trusted.registries"),
        (MOUNT, "mount of /home is refused", "docker.allowed.ro-mounts"),
        (
            'docker: Error response from daemon: invalid mount config for type "bind": bind source'
            " path does not exist: /nowhere.",
            "mount of /nowhere. fails",
            "create it there",
        ),
        (
            "Could not find requested network in allowed networks",
            "network of the container is not allowed",
            "default-container-network=host",
        ),
        (
            "Disallowed network:  'bridge' specified. Allowed networks: are [host]",
            "network bridge of the container",
            "docker.allowed.networks",
        ),
        (
            "docker: Error response from daemon: Unknown runtime specified nvidia.",
            "does not know the runtime nvidia",
            "nvidia-ctk runtime configure",
        ),
        (
            "docker: Error response from daemon: unknown or invalid runtime name: nvidia",
            "does not know the runtime nvidia",
            "nvidia-ctk",
        ),
        (
            "Could not find requested runtime in allowed runtimes",
            "runtime of YARN's GPU plugin is not allowed",
            "docker.allowed.runtimes",
        ),
        ("uid: 0 below threshold: 1", "the uid is too low", "userremapping-uid-threshold"),
        ("Requested user root is banned", "containers for the user root", "banned.users"),
        ("User alice not found", "containers for the user alice", "create the user"),
        (PULL, "local/x:1 is not on the node.*manifest unknown", "push the image"),
        (
            'OCI runtime create failed: exec: "bash": executable file not found in $PATH',
            "no bash",
            "install bash",
        ),
        ("Process List(./hopsgpu-discovery/gpus-1) exited with code 127", "no python3", "PATH"),
        (
            "Process List(./hopsgpu-discovery/gpus-1-1g.10gb+me) exited with code 127",
            "no python3",
            "PATH",
        ),
        (
            "/bin/bash: line 1: /usr/lib/jvm/java-17/bin/java: No such file or directory",
            "no Java",
            "spark.executorEnv.JAVA_HOME",
        ),
    ],
)
def test_a_setting_is_named_with_what_to_do(output: str, reason: str, remedy: str) -> None:
    exit_ = explain_exit(FRAME.format(output))
    assert exit_ is not None and exit_.is_setting
    assert re.search(reason, exit_.reason), exit_.reason
    assert remedy in exit_.remedy


def test_a_dockerd_that_does_not_run_may_run_again() -> None:
    exit_ = explain_exit("docker: Cannot connect to the Docker daemon at unix:///run/docker.sock.")
    assert exit_ is not None and not exit_.is_setting


def test_other_ends_have_the_last_error_of_the_log() -> None:
    exit_ = container_exit(
        FRAME.format("java.lang.OutOfMemoryError: Java heap space\n\tat java.base/Thread.run")
    )
    assert exit_.reason == "Shell error output: java.lang.OutOfMemoryError: Java heap space"
    assert not exit_.is_setting
    # A message about memory that happens to name a user is no setting.
    assert explain_exit("running beyond the 'PHYSICAL' memory limit") is None


def test_control_characters_of_a_log_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in container_exit("ERROR \x1b[2J gone").reason


def test_two_containers_with_one_cause_are_of_one_kind() -> None:
    exits = [
        explain_exit(
            f"Configuration does not allow docker mount '/data/yarn/{n}/log:/x:rw', realpath=/y"
        )
        for n in (1, 2)
    ]
    assert exits[0] is not None and exits[1] is not None
    assert exits[0].reason != exits[1].reason and exits[0].kind == exits[1].kind
