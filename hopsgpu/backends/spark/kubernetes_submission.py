"""The settings of an application whose driver runs in a pod, and the directory of its files.

spark-submit uploads the files of this machine, which the driver's pod downloads when it starts.
Spark leaves them there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping

from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured
from hopsgpu.storage.identity import hadoop_user
from hopsgpu.storage.kerberos import is_kerberized
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

UPLOADS = "spark.kubernetes.file.upload.path"
_USER = "HADOOP_USER_NAME"
_USER_OF_DRIVER = f"spark.kubernetes.driverEnv.{_USER}"
_DIRECTORY = "uploads"
_NAME = re.compile(r"(\d{1,12})-(hopsgpu-submit-[0-9a-f]+)")
# A submission whose driver's pod does not exist yet may be this old.
_UNSUBMITTED_SECONDS = 3600.0


@contextlib.contextmanager
def prepare_driver_pod(
    properties: Mapping[str, str],
    root: Callable[[], LakePath],
    manager: KubernetesManager | None,
    tag: str | None,
    is_detached: bool,
) -> Iterator[Mapping[str, str]]:
    """Provide further properties of a submission in cluster mode.

    Unless the user names a directory for uploads, they are in one of this submission below the
    root on the lake. It is removed at the end; of detached applications, by a later submission.

    Args:
        root: returns the root on the lake, which is asked only if it is needed.
        manager: None if nothing is submitted (`--dry-run`).
        tag: identifies the submission; None if nothing is submitted.

    Raises:
        ConfigError: there is no root that a pod reaches.
        StoreError: the directory cannot be created.
    """
    settings = _user_of_driver(properties)
    if properties.get(UPLOADS):
        yield settings
        return
    lake = root()
    if manager is None or tag is None:
        yield {**settings, UPLOADS: spark_url((lake / _DIRECTORY).url)}
        return
    uploads = lake / _DIRECTORY / f"{manager.cluster}-{manager.namespace}"
    _remove_unused(uploads, manager)
    directory = uploads / f"{time.time():.0f}-{tag}"
    directory.make()
    if not directory.is_object_store:
        # The files are the user's source code.
        directory.set_mode(0o700)
    is_needed = False
    try:
        yield {**settings, UPLOADS: spark_url(directory.url)}
        is_needed = is_detached
    finally:
        if not is_needed:
            _remove(directory)


def spark_url(url: str) -> str:
    """Return the URL of a directory on the lake by which Spark's JVM knows it."""
    return f"s3a://{url.removeprefix('s3://')}" if url.startswith("s3://") else url


def _user_of_driver(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the property by which a driver's pod acts for this user on HDFS."""
    if _USER_OF_DRIVER in properties or not is_configured(os.environ):
        return {}
    hadoop = HadoopConf.load_hdfs(os.environ).get
    if is_kerberized(hadoop):
        raise ConfigError(
            "the Hadoop configuration requires Kerberos, and hopsgpu passes no tokens to pods: use"
            " YARN, or a Hadoop configuration without Kerberos"
        )
    return {_USER_OF_DRIVER: hadoop_user(hadoop, os.environ)}


def _remove_unused(uploads: LakePath, manager: KubernetesManager) -> None:
    """Remove the directories of submissions whose driver's pod has ended or was deleted."""
    try:
        names = uploads.names(only_directories=True)
        living = manager.submitted_drivers().living_submissions() if names else frozenset()
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None or match[2] in living:
                continue
            if time.time() - int(match[1]) > _UNSUBMITTED_SECONDS:
                log.info("removes the uploads of an earlier submission: %s", name)
                (uploads / name).remove()
    except HopsGpuError as error:
        # Unused directories only take space, and the next submission tries again.
        log.warning("uploads of earlier submissions stay in %s: %s", uploads.url, error)


def _remove(directory: LakePath) -> None:
    try:
        directory.remove()
    except HopsGpuError as error:
        log.warning("the uploaded files stay in %s: %s", directory.url, error)
