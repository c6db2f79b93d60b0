"""The container image in which the executors of an application run, as properties. Pure.

A NodeManager of YARN reads the runtime and the image of a container from the environment of its
launch context. Spark fills this environment from `spark.executorEnv.*`, for all executors of an
application alike: a resource profile has no environment of its own (Spark's ExecutorRunnable, in
3.5 and 4). The image therefore belongs to the application.

Sources: Hadoop's documentation, "Launching Applications Using Docker Containers" and "Launching
Applications Using runC Containers".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hopsgpu.backends.spark.settings import is_cluster_mode
from hopsgpu.core.image_names import check_image_name
from hopsgpu.errors import ConfigError

IMAGE, RUNTIME = "spark.hopsgpu.image", "spark.hopsgpu.image.runtime"
_IMAGE_VARIABLE, _RUNTIME_VARIABLE = "HOPSGPU_IMAGE", "HOPSGPU_IMAGE_RUNTIME"
DOCKER, RUNC = "docker", "runc"
_RUNTIMES = (DOCKER, RUNC)
_EXECUTORS, _MASTER = "spark.executorEnv.", "spark.yarn.appMasterEnv."
_TYPE = "YARN_CONTAINER_RUNTIME_TYPE"
_NAMES = {
    DOCKER: "YARN_CONTAINER_RUNTIME_DOCKER_IMAGE",
    RUNC: "YARN_CONTAINER_RUNTIME_RUNC_IMAGE",
}
_NETWORKS = {
    DOCKER: "YARN_CONTAINER_RUNTIME_DOCKER_CONTAINER_NETWORK",
    RUNC: "YARN_CONTAINER_RUNTIME_RUNC_CONTAINER_NETWORK",
}
# Docker's default of 64 MiB is too small for the workers of a DataLoader. A tmpfs may use half of
# the node's memory, and counts as memory of the container.
_SHARED_MEMORY = "/dev/shm"
_TMPFS = "YARN_CONTAINER_RUNTIME_DOCKER_TMPFS_MOUNTS"
_MOUNTS = "YARN_CONTAINER_RUNTIME_DOCKER_MOUNTS"
PYTHON = "spark.pyspark.python"


def image_properties(
    setting: Callable[[str], str | None], environ: Mapping[str, str], python: str
) -> dict[str, str]:
    """Return the properties that make an application's executors run in its image.

    In cluster mode the driver, which runs in the application master, runs in the image too. The
    executors' Python is the image's, found on its PATH.

    Args:
        setting: returns a property that the application has, such as `spark.hopsgpu.image`; None if
            it is not set.
        environ: variables that count where a property is not set: HOPSGPU_IMAGE and
            HOPSGPU_IMAGE_RUNTIME.
        python: minor version of the driver's Python, such as "3.11".

    Raises:
        ConfigError: the name of the image or of the runtime is invalid, or other properties name
            another image.
    """
    image = requested_image(setting, environ)
    if not image:
        return {}
    check_image_name(image, IMAGE)
    runtime = setting(RUNTIME) or environ.get(_RUNTIME_VARIABLE) or DOCKER
    if runtime not in _RUNTIMES:
        raise ConfigError(f"{RUNTIME}={runtime!r}: must be {' or '.join(_RUNTIMES)}")
    properties = {IMAGE: image, RUNTIME: runtime}
    for prefix in (_EXECUTORS, _MASTER) if is_cluster_mode(setting) else (_EXECUTORS,):
        for variable, value in ((_TYPE, runtime), (_NAMES[runtime], image)):
            name = prefix + variable
            if setting(name) not in (None, value):
                raise ConfigError(
                    f"{IMAGE}={image} with {name}={setting(name)}: these are two answers to which"
                    " image the containers run in; remove one of them"
                )
            properties[name] = value
        mounts = f"{setting(prefix + _MOUNTS) or ''}{setting(prefix + _TMPFS) or ''}"
        if runtime == DOCKER and _SHARED_MEMORY not in mounts:
            listed = (setting(prefix + _TMPFS), _SHARED_MEMORY)
            properties[prefix + _TMPFS] = ",".join(filter(None, listed))
    properties[PYTHON] = setting(PYTHON) or f"python{python}"
    return properties


def requested_image(setting: Callable[[str], str | None], environ: Mapping[str, str]) -> str | None:
    """Return the image that an application with these properties gets; None or "" for none."""
    return setting(IMAGE) or environ.get(_IMAGE_VARIABLE)


def runtime_of(setting: Callable[[str], str | None]) -> str | None:
    """Return "docker" or "runc", by which the executors run in an image; None if they do not."""
    runtime = setting(_EXECUTORS + _TYPE)
    return runtime if runtime in _NAMES else None


def image_of(setting: Callable[[str], str | None]) -> str | None:
    """Return the image in which an application's executors run; None if they run in none."""
    runtime = runtime_of(setting)
    return None if runtime is None else setting(_EXECUTORS + _NAMES[runtime])


def network_of(setting: Callable[[str], str | None], runtime: str) -> str | None:
    """Return the network that the executors' containers request; None for the nodes' default."""
    return setting(_EXECUTORS + _NETWORKS[runtime])


def refuse_other_image(requested: str, running: str | None) -> None:
    """Refuse an image that is not the application's.

    Raises:
        ConfigError: the executors of the application run in another image, or in none.
    """
    if requested == running:
        return
    where = "no image" if running is None else f"the image {running!r}"
    raise ConfigError(
        f"image={requested!r}: the executors of this application run in {where}, and all executors"
        " of a Spark application run in the same one, because Spark has a single environment for"
        f" them. Call hopsgpu.session(name, image={requested!r}), after spark.stop() if a session"
        " is active; or leave image out"
    )


def refuse_image(image: str, master: str) -> None:
    """Refuse an image for an application whose executors run in none.

    Args:
        master: what the application runs on, such as "a local master".

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"image={image!r} with {master}: only YARN and Kubernetes start executors in images; leave"
        " image out to run in this Python, or name one of these as the master"
    )
