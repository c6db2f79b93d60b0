"""Checks of a container image, and of the containers that run in it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hopsgpu.cluster_managers.yarn.container_runtime import RuntimeProblem
from hopsgpu.doctor.node_probe import ContainerFacts, NodeFacts
from hopsgpu.doctor.report import Check, join_names, ok, unknown, wrong
from hopsgpu.units import count_of

IMAGE = "image"
NAMES = ("shared memory", "limits", "network", "user", "tokens", "hadoop conf")
_MIN_SHARED_BYTES = 2**30
_MIN_OPEN_FILES = 4096
_MIB = 2**20
_UNLIMITED = -1


def check_image(
    image: str,
    runtime: str,
    asked: int,
    problems: Mapping[str, RuntimeProblem],
) -> Check:
    """Check whether the NodeManagers start containers in images.

    Args:
        asked: number of NodeManagers that told their settings.
        problems: by host.
    """
    if not asked:
        return unknown(
            IMAGE,
            f"{image} by {runtime}: no NodeManager tells its settings",
            "open the NodeManagers' web ports to this machine",
        )
    if problems:
        return wrong(
            IMAGE,
            f"{image} by {runtime}: not on {join_names(sorted(problems))}",
            "change these settings in yarn-site.xml of the nodes (docs/docker.md)",
            (f"{host}: {problem.text}" for host, problem in sorted(problems.items())),
        )
    return ok(IMAGE, f"{image} by {runtime}: allowed on {count_of(asked, 'node')}")


def check_containers(facts: Sequence[NodeFacts]) -> tuple[Check, ...]:
    """Return the checks of containers in an image."""
    if not facts:
        return tuple(unknown(name, "no container could be checked") for name in NAMES)
    return (
        _check_shared_memory(facts),
        _check_limits(facts),
        _check_network(facts),
        _check_user(facts),
        _check_tokens(facts),
        _check_hadoop_conf(facts),
    )


def _check_shared_memory(facts: Sequence[NodeFacts]) -> Check:
    name = NAMES[0]
    small = _where(facts, lambda c: (c.shared_memory or 0) < _MIN_SHARED_BYTES)
    seen = "; ".join(_group(facts, lambda c: f"/dev/shm of {(c.shared_memory or 0) // _MIB} MiB"))
    if small:
        return wrong(
            name,
            f"{seen}: the workers of a DataLoader need more, and end with a bus error",
            "let hopsgpu mount a tmpfs there (remove YARN_CONTAINER_RUNTIME_DOCKER_TMPFS_MOUNTS and"
            " …_MOUNTS of /dev/shm from spark.executorEnv), or set default-shm-size in dockerd's"
            " daemon.json",
        )
    return ok(name, seen)


def _check_limits(facts: Sequence[NodeFacts]) -> Check:
    name = NAMES[1]

    def describe(container: ContainerFacts) -> str:
        locked = container.locked_memory
        memory = "unlimited" if locked == _UNLIMITED else f"{locked // 1024} KiB"
        return f"{container.open_files} open files, {memory} of locked memory"

    seen = "; ".join(_group(facts, describe))
    if few := _where(facts, lambda c: 0 <= c.open_files < _MIN_OPEN_FILES):
        return wrong(
            name,
            f"{seen}: too few open files on {join_names(few)} for large gangs and DataLoaders",
            'set "default-ulimits": {"nofile": {"Name": "nofile", "Soft": 65536, "Hard": 65536}} in'
            " dockerd's daemon.json",
        )
    if _where(facts, lambda c: c.locked_memory != _UNLIMITED):
        seen += " (NCCL over InfiniBand needs it unlimited: memlock in default-ulimits)"
    return ok(name, seen)


def _check_network(facts: Sequence[NodeFacts]) -> Check:
    name = NAMES[2]
    if apart := _where(facts, lambda c: c.has_host_network is False):
        return wrong(
            name,
            f"the containers on {join_names(apart)} have a network of their own, in which ranks of"
            " other nodes cannot reach them",
            "set yarn.nodemanager.runtime.linux.docker.default-container-network=host, and remove"
            " YARN_CONTAINER_RUNTIME_DOCKER_CONTAINER_NETWORK from spark.executorEnv",
        )
    if nameless := _where(facts, lambda c: c.has_host_network is None):
        return unknown(
            name,
            f"the name of the node is unknown in its container: {join_names(nameless)}; the gang"
            " reached the driver",
        )
    return ok(name, "the nodes'")


def _check_user(facts: Sequence[NodeFacts]) -> Check:
    name = NAMES[3]
    nameless = _where(facts, lambda c: not c.user)
    seen = "; ".join(_group(facts, lambda c: f"{c.user or 'no name'} (uid {c.uid})"))
    if nameless:
        return wrong(
            name,
            f"{seen}: the image has no name for the container's user on {join_names(nameless)}, and"
            " getpass.getuser() fails, which torch calls",
            "mount the nodes' /etc/passwd and /etc/group"
            " (yarn.nodemanager.runtime.linux.docker.default-ro-mounts), or set"
            " spark.executorEnv.USER",
        )
    return ok(name, seen)


def _check_tokens(facts: Sequence[NodeFacts]) -> Check:
    name = NAMES[4]
    unreadable = _where(facts, lambda c: c.tokens == "unreadable")
    if unreadable:
        return wrong(
            name,
            f"the container's tokens cannot be read on {join_names(unreadable)}",
            "the container must run as the application's user: see users in docs/docker.md",
        )
    return ok(name, "; ".join(_group(facts, lambda c: f"HDFS tokens: {c.tokens}")))


def _check_hadoop_conf(facts: Sequence[NodeFacts]) -> Check:
    name = NAMES[5]
    seen = "; ".join(_group(facts, lambda c: c.hadoop_conf or "HADOOP_CONF_DIR is not set"))
    missing = _where(facts, lambda c: bool(c.hadoop_conf) and not c.has_hadoop_conf)
    if missing:
        return wrong(
            name,
            f"{seen}: not in the container on {join_names(missing)}. hopsgpu does not need it, but"
            " Hadoop's own clients in ranks do",
            "mount the directory (yarn.nodemanager.runtime.linux.docker.default-ro-mounts)",
        )
    return ok(name, seen)


def _where(facts: Sequence[NodeFacts], holds: Callable[[ContainerFacts], bool]) -> list[str]:
    return sorted(node.host for node in facts if holds(node.container))


def _group(facts: Sequence[NodeFacts], describe: Callable[[ContainerFacts], str]) -> list[str]:
    """Return each description with the hosts that it holds for."""
    hosts: dict[str, list[str]] = {}
    for node in facts:
        hosts.setdefault(describe(node.container), []).append(node.host)
    return [f"{text} on {join_names(sorted(names))}" for text, names in hosts.items()]
