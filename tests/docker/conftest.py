"""A cluster whose containers can run in Docker; `make docker` runs these tests, as root."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from tests.docker.images import SITE_PACKAGES, import_image

TRAIN, BARE = "local/train:1", "local/bare:1"
# The packages of the image are this environment's, which the administrator would install.
PACKAGES = sysconfig.get_path("purelib")
_VARIABLE = "YARN_CONTAINER_RUNTIME_DOCKER_MOUNTS"
MOUNTS = f"spark.executorEnv.{_VARIABLE}"
CONF = {
    MOUNTS: f"{PACKAGES}:{SITE_PACKAGES}:ro",
    f"spark.yarn.appMasterEnv.{_VARIABLE}": f"{PACKAGES}:{SITE_PACKAGES}:ro",
    "spark.dynamicAllocation.maxExecutors": "8",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.fixture(scope="session")
def cluster_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("docker")
    conf = {"container-executor": {"docker.allowed.ro-mounts": PACKAGES}}
    try:
        devcluster.up(directory, has_docker=True, conf=conf, keep_classes=True)
        yield directory
    finally:
        devcluster.down(directory)


@pytest.fixture(scope="session")
def docker(cluster_env: dict[str, str]) -> Callable[..., str]:
    """Runs a command of Docker on the cluster's dockerd, which has the images."""

    def run(*arguments: str) -> str:
        command = ["docker", *arguments]
        ran = subprocess.run(command, env=cluster_env, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    java = Path(cluster_env["JAVA_HOME"])
    for name, has_python in ((TRAIN, True), (BARE, False)):
        import_image(cluster_env, name, java=java, has_python=has_python)
    return run


@pytest.fixture(scope="module")
def spark(docker: Callable[..., str]) -> Iterator[SparkSession]:
    session = hopsgpu.session("docker-tests", conf=CONF, image=TRAIN)
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def manager(cluster_env: dict[str, str]) -> ResourceManager:
    from hopsgpu.storage.hadoop_conf import HadoopConf

    return ResourceManager(web_addresses(HadoopConf.load(cluster_env).get))
