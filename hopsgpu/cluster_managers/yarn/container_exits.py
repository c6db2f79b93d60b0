"""Why YARN's containers ended: causes and remedies from their diagnostics. Pure.

Sources: Hadoop's DelegatingLinuxContainerRuntime, DockerLinuxContainerRuntime, and the messages of
its program container-executor (docker-util.c, util.c); Docker's messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hopsgpu.terminal_text import printable

_CFG = "container-executor.cfg on the nodes"
_SITE = "yarn-site.xml of the nodes"
_DOCKER = "yarn.nodemanager.runtime.linux.docker"
_MAX_REASON_LENGTH = 300
_DISCOVERY = "hopsgpu discovery: "
# The parts of a reason that differ between containers with the same cause.
_VARYING = re.compile(r"\b(application|container)_\w+|/\S+|\d+")


@dataclass(frozen=True)
class ContainerExit:
    """Why a container ended.

    Attributes:
        reason: the cause, as the rest of a sentence about the container.
        remedy: what an administrator or a user can do, or "".
        is_setting: whether a setting causes the end, so that each container ends like this.
    """

    reason: str
    remedy: str = ""
    is_setting: bool = False

    @property
    def kind(self) -> str:
        """The part of the reason that containers with the same cause share."""
        return _VARYING.sub("", self.reason)


# Pattern in the diagnostics → cause and remedy. Groups of the pattern replace {0} and {1}.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"Requested runtime not allowed",
        "the NodeManager does not allow containers in images",
        "set yarn.nodemanager.runtime.linux.allowed-runtimes=default,docker (or default,runc), and"
        " yarn.nodemanager.container-executor.class to LinuxContainerExecutor, in " + _SITE,
    ),
    (
        r"image: (\S+) is not trusted|Docker image is not trusted()",
        "the registry of the image {0} is not trusted",
        f"add its registry to docker.trusted.registries in {_CFG} (local for local/NAME, library"
        " for names without a registry), or use an image of a trusted one",
    ),
    (
        r"Configuration does not allow docker mount '([^':]+)"
        r"|Invalid docker (?:read-only|read-write|rw|ro) mount '([^':]+)",
        "the mount of {0} is refused",
        f"list it in docker.allowed.ro-mounts or docker.allowed.rw-mounts in {_CFG}; mounts come"
        f" from {_DOCKER}.default-ro-mounts and default-rw-mounts, YARN's directories and"
        " spark.executorEnv.YARN_CONTAINER_RUNTIME_DOCKER_MOUNTS",
    ),
    (
        r"Could not determine real path of mount '([^':]+)|bind source path does not exist: (\S+)",
        "the mount of {0} fails, because the path does not exist on the node",
        f"create it there, or remove the mount ({_DOCKER}.default-ro-mounts, …-rw-mounts,"
        " spark.executorEnv.YARN_CONTAINER_RUNTIME_DOCKER_MOUNTS)",
    ),
    (
        r"Disallowed network: *'([^']+)'|Could not find requested network in allowed networks()",
        "the network {0} of the container is not allowed",
        f"set {_DOCKER}.default-container-network=host and allow host in"
        f" {_DOCKER}.allowed-container-networks in {_SITE}, and in docker.allowed.networks in"
        f" {_CFG}",
    ),
    (
        r"(?i)unknown (?:or invalid )?runtime (?:specified|name:?) ?(\w+)",
        "dockerd does not know the runtime {0}, with which YARN's GPU plugin starts containers",
        "install NVIDIA's Container Toolkit on the nodes, run `nvidia-ctk runtime configure`, and"
        " restart dockerd",
    ),
    (
        r"Could not find requested runtime in allowed runtimes|Disallowed runtime: *'[^']*'",
        "the container runtime of YARN's GPU plugin is not allowed",
        f"allow nvidia in docker.allowed.runtimes in {_CFG}, and in"
        f" {_DOCKER}.allowed-container-runtimes in {_SITE}",
    ),
    (
        r"localhost:3476|nvidia-docker(?:-v1)? .*(?:refused|failed)",
        "YARN's GPU plugin looks for the first nvidia-docker, which is not on the node",
        f"set yarn.nodemanager.resource-plugins.gpu.docker-plugin=nvidia-docker-v2 in {_SITE}",
    ),
    (
        r"(uid|gid): \d+ below threshold: \d+",
        "YARN refuses the container's user, because the {0} is too low",
        f"submit as an ordinary user, or lower {_DOCKER}.userremapping-{{0}}-threshold in {_SITE}",
    ),
    (
        r"Requested user (\S+) is (?:banned|not whitelisted)|User (\S+) not found",
        "the nodes do not run containers for the user {0}",
        f"create the user on the nodes, and see banned.users, min.user.id and allowed.system.users"
        f" in {_CFG}",
    ),
    (
        r"exec: \\?\"bash\\?\": executable file not found",
        "the image has no bash, with which YARN starts containers",
        "install bash in the image",
    ),
    (
        r"hopsgpu-discovery/gpus-[\w.+-]+\) exited with code 127",
        "the container has no python3 on its PATH, with which GPUs are discovered",
        "install Python on the nodes; or use an image whose PATH has python3, of the driver's"
        " version",
    ),
    (
        r"/java: No such file or directory|JAVA_HOME is not set",
        "the container has no Java at the nodes' JAVA_HOME",
        "install Java in the image and set spark.executorEnv.JAVA_HOME to its directory there, or"
        f" mount the nodes' Java ({_DOCKER}.default-ro-mounts)",
    ),
)
# Docker's own errors. A registry may answer again, and another node may have the image.
_IMAGE_MISSING = re.compile(
    r"Unable to find image '([^']+)' locally"
    r"|(?:pull access denied for|manifest for|No such image:?) ([^\s,]+)"
)
_NO_DAEMON = re.compile(r"Cannot connect to the Docker daemon")


def container_exit(diagnostics: str) -> ContainerExit:
    """Return why a container ended, from YARN's diagnostics with the end of the container's log.

    The log is a program's output: the reason has no control characters.
    """
    cause = explain_exit(diagnostics) or ContainerExit(last_reason(diagnostics))
    return replace(cause, reason=printable(cause.reason))


def explain_exit(diagnostics: str) -> ContainerExit | None:
    """Return why a container ended, from YARN's diagnostics; None if they do not tell."""
    for pattern, reason, remedy in _CAUSES:
        if match := re.search(pattern, diagnostics):
            name = next(filter(None, match.groups()), "")
            return ContainerExit(
                " ".join(reason.format(name).split()), remedy.format(name), is_setting=True
            )
    if match := _IMAGE_MISSING.search(diagnostics):
        answer = re.search(r"Error response from daemon: ([^\n]+)", diagnostics)
        why = f" ({answer[1][:_MAX_REASON_LENGTH]})" if answer else ""
        return ContainerExit(
            f"the image {match[1] or match[2]} is not on the node, and cannot be pulled{why}",
            "check the name and the tag; push the image to a registry that the nodes reach, and for"
            " a private registry set spark.executorEnv.YARN_CONTAINER_RUNTIME_DOCKER_CLIENT_CONFIG",
            is_setting=True,
        )
    if _NO_DAEMON.search(diagnostics):
        return ContainerExit("dockerd does not run on the node", "start it there")
    return None


def last_reason(log: str) -> str:
    """Return the discovery script's last message in an executor's log, else the last error."""
    lines = [line.strip() for line in log.splitlines()]
    ours = [line.partition(_DISCOVERY)[2] for line in lines if _DISCOVERY in line]
    errors = [line for line in lines if re.search(r"\b(ERROR|[\w.]+(Error|Exception)\b)", line)]
    reasons = ours or errors or [line for line in lines if line]
    return reasons[-1][:_MAX_REASON_LENGTH] if reasons else ""
