from __future__ import annotations

import pytest

from hopsgpu.backends.spark.container_image import (
    image_of,
    image_properties,
    network_of,
    refuse_image,
    refuse_other_image,
    runtime_of,
)
from hopsgpu.core.image_names import check_image_name
from hopsgpu.errors import ConfigError

EXECUTORS = "spark.executorEnv.YARN_CONTAINER_RUNTIME_"
MASTER = "spark.yarn.appMasterEnv.YARN_CONTAINER_RUNTIME_"


def test_without_an_image_nothing_is_set() -> None:
    assert image_properties({}.get, {}, "3.11") == {}


def test_executors_run_in_the_image_with_its_python_and_shared_memory() -> None:
    properties = image_properties({"spark.hopsgpu.image": "local/train:1"}.get, {}, "3.11")
    assert properties == {
        "spark.hopsgpu.image": "local/train:1",
        "spark.hopsgpu.image.runtime": "docker",
        f"{EXECUTORS}TYPE": "docker",
        f"{EXECUTORS}DOCKER_IMAGE": "local/train:1",
        f"{EXECUTORS}DOCKER_TMPFS_MOUNTS": "/dev/shm",
        "spark.pyspark.python": "python3.11",
    }
    assert image_of(properties.get) == "local/train:1" and runtime_of(properties.get) == "docker"


def test_variables_count_where_a_property_is_not_set() -> None:
    environ = {"HOPSGPU_IMAGE": "of/environment", "HOPSGPU_IMAGE_RUNTIME": "runc"}
    assert image_of(image_properties({}.get, environ, "3.11").get) == "of/environment"
    conf = {"spark.hopsgpu.image": "a/b", "spark.hopsgpu.image.runtime": "docker"}
    assert image_of(image_properties(conf.get, environ, "3.11").get) == "a/b"


def test_in_cluster_mode_the_driver_runs_in_the_image_too() -> None:
    conf = {"spark.hopsgpu.image": "a/b", "spark.submit.deployMode": "cluster"}
    properties = image_properties(conf.get, {}, "3.11")
    assert properties[f"{MASTER}DOCKER_IMAGE"] == "a/b" and properties[f"{MASTER}TYPE"] == "docker"


def test_runc_names_its_own_variable_and_gets_no_docker_mount() -> None:
    conf = {"spark.hopsgpu.image": "a/b", "spark.hopsgpu.image.runtime": "runc"}
    properties = image_properties(conf.get, {}, "3.11")
    assert properties[f"{EXECUTORS}RUNC_IMAGE"] == "a/b"
    assert not any("TMPFS" in name for name in properties)
    assert image_of(properties.get) == "a/b"


@pytest.mark.parametrize("variable", ["DOCKER_MOUNTS", "DOCKER_TMPFS_MOUNTS"])
def test_a_users_mount_at_shared_memory_stays(variable: str) -> None:
    conf = {"spark.hopsgpu.image": "a/b", EXECUTORS + variable: "/dev/shm:/dev/shm:rw"}
    assert f"{EXECUTORS}DOCKER_TMPFS_MOUNTS" not in image_properties(conf.get, {}, "3.11")


def test_a_users_other_tmpfs_is_kept_beside_shared_memory() -> None:
    conf = {"spark.hopsgpu.image": "a/b", f"{EXECUTORS}DOCKER_TMPFS_MOUNTS": "/scratch"}
    properties = image_properties(conf.get, {}, "3.11")
    assert properties[f"{EXECUTORS}DOCKER_TMPFS_MOUNTS"] == "/scratch,/dev/shm"
    # A second expansion of the same properties changes nothing.
    assert image_properties({**conf, **properties}.get, {}, "3.11").items() <= properties.items()


def test_a_named_python_of_the_image_is_kept() -> None:
    conf = {"spark.hopsgpu.image": "a/b", "spark.pyspark.python": "/opt/conda/bin/python"}
    assert image_properties(conf.get, {}, "3.11")["spark.pyspark.python"] == "/opt/conda/bin/python"


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({f"{EXECUTORS}DOCKER_IMAGE": "other"}, "two answers to which image"),
        ({f"{EXECUTORS}TYPE": "runc"}, "two answers"),
        ({"spark.hopsgpu.image.runtime": "podman"}, "must be docker or runc"),
        ({"spark.hopsgpu.image": "a b"}, "must be the name of a container image"),
    ],
)
def test_contradictions_are_refused(conf: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        image_properties({"spark.hopsgpu.image": "a/b", **conf}.get, {}, "3.11")


@pytest.mark.parametrize(
    "image", ["train", "local/train:1", "registry.company:5000/team/train:1.2-gpu", "a.b/c"]
)
def test_names_that_yarn_accepts(image: str) -> None:
    check_image_name(image, "image")


@pytest.mark.parametrize(
    "image",
    [
        "",
        "a/b@sha256:0123",
        "-v",
        "--privileged",
        "a;rm",
        "a b",
        "a\n",
        7,
        None,
        "x" * 600,
    ],
)
def test_names_that_yarn_refuses(image: object) -> None:
    with pytest.raises(ConfigError, match=r"image=.*such as 'registry\.company"):
        check_image_name(image, "image")


def test_another_image_than_the_applications_is_refused() -> None:
    refuse_other_image("a", "a")
    for running in ("b", None):
        with pytest.raises(ConfigError, match="Spark has a single environment"):
            refuse_other_image("a", running)
    with pytest.raises(ConfigError, match="only YARN and Kubernetes start executors in images"):
        refuse_image("a", "a local master")


def test_the_network_is_that_of_the_runtime() -> None:
    conf = {f"{EXECUTORS}DOCKER_CONTAINER_NETWORK": "bridge"}
    assert network_of(conf.get, "docker") == "bridge" and network_of(conf.get, "runc") is None
