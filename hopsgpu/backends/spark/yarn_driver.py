"""A driver inside YARN: in cluster mode it runs in the application master's container."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark import SparkContext

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.settings import check_session, check_submitted, is_cluster_mode
from hopsgpu.cluster_managers.yarn.gpu_resource import SPARK_SETTING, choose_gpu_resource
from hopsgpu.control.peer import lake_environment
from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_tokens import name_configured_tokens
from hopsgpu.storage.identity import PROXY_USER, ensure_credentials
from hopsgpu.storage.kerberos import CACHE, KEYTAB, named_keytab

log = logging.getLogger(__name__)


def settings_inside(
    defaults: Mapping[str, str], submitted: Mapping[str, str], requested: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings with which a driver in YARN creates its context.

    Args:
        submitted: the settings that the application was submitted with.

    Raises:
        ConfigError: a setting comes too late, or prevents gangs; the message says what spark-submit
            should have received or shipped.
    """
    check_submitted(submitted.get, requested)
    settings = {**defaults, **submitted, **requested}
    settings[SPARK_SETTING] = choose_gpu_resource(settings, os.environ)
    check_session(settings)
    return settings


def act_for_submitter(context: SparkContext) -> None:
    """Make HDFS clients of a driver in YARN act for the submitter.

    The clients use the submitter's Hadoop configuration. A container runs as the NodeManager's
    user, with that node's HADOOP_CONF_DIR. With Kerberos, the container's tokens identify the
    submitter. In client mode, this process's ticket or the session's keytab does, and a proxy user
    is that of Spark.

    Raises:
        ConfigError: in client mode, with Kerberos there is no valid ticket, or HADOOP_PROXY_USER
            does not name the user of Spark's JVM.
    """
    jvm = Jvm(context)
    if is_cluster_mode(jvm.setting):
        user = None if jvm.is_kerberized() else jvm.user()
        os.environ.update(lake_environment(user, {}))
        if user is None:
            _use_credentials(jvm)
    else:
        if (proxied := jvm.proxied_user()) is not None:
            # spark-submit --proxy-user sets the user of the JVM only.
            log.info("acts for %s, as Spark does", proxied)
            os.environ[PROXY_USER] = proxied
        elif (named := os.environ.get(PROXY_USER)) and named != jvm.user():
            raise ConfigError(
                f"{PROXY_USER}={named}, and Spark's JVM acts for {jvm.user()}: set the variable"
                " before the session starts"
            )
        # The user may have created the session without hopsgpu.session().
        ensure_credentials(jvm.hadoop, jvm.setting, os.environ)


def _use_credentials(jvm: Jvm) -> None:
    """Make Python's clients in a driver in YARN use the submitter's credentials of Spark.

    HDFS accepts the container's tokens. YARN's REST interfaces accept only tickets: libkrb5 gets
    them with the keytab that Spark has shipped, into a cache in this container.
    """
    name_configured_tokens(os.environ)
    if (keytab := shipped_keytab(jvm.setting)) is not None:
        log.info("tickets for YARN's REST come from the shipped keytab")
        os.environ[KEYTAB] = f"FILE:{keytab}"
        os.environ[CACHE] = f"FILE:{Path('hopsgpu-tickets').absolute()}"


def shipped_keytab(setting: Callable[[str], str | None]) -> Path | None:
    """Return the keytab that Spark has shipped to a driver in YARN; None without one."""
    name = named_keytab(setting)
    file = Path(Path(name).name).absolute() if name else None
    return file if file is not None and file.is_file() else None
