"""Checks of Spark's settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.backends.spark.container_image import IMAGE
from hopsgpu.backends.spark.package_archive import ARCHIVES
from hopsgpu.backends.spark.settings import check_gang, check_session, session_defaults
from hopsgpu.cluster_managers.manager_table import MASTER, kind_of
from hopsgpu.doctor.report import Check, ok, wrong
from hopsgpu.errors import ConfigError
from hopsgpu.gpu.script_archive import ALIAS

# The RAPIDS Accelerator needs this property; distributions' guides set it in spark-defaults.conf.
_EXECUTORS_GPUS = "spark.executor.resource.gpu.amount"


def session_settings(
    master: str, defaults: Mapping[str, str], conf: Mapping[str, str]
) -> dict[str, str]:
    """Return the properties of hopsgpu.session(master=master, conf=conf) in a plain script."""
    shipped = {ARCHIVES: f"#{ALIAS}"}
    settings = {**defaults, MASTER: master, **session_defaults(master), **conf, **shipped}
    image, kind = settings.get(IMAGE), kind_of(master)
    return {**(kind.image_settings(image) if image and kind is not None else {}), **settings}


def check_settings(
    master: str, defaults: Mapping[str, str], conf: Mapping[str, str], nodes: int
) -> Check:
    """Check whether a session can hold gangs with one executor on each of `nodes` nodes."""
    name, settings = "settings", session_settings(master, defaults, conf)
    try:
        check_session(settings)
        check_gang(settings.get, max(nodes, 1))
    except ConfigError as error:
        return wrong(
            name,
            "hopsgpu.session() is refused",
            "change these settings in spark-defaults.conf, or in conf= (--conf here)",
            [str(error)],
        )
    amount = settings.get(_EXECUTORS_GPUS, "0")
    if amount != "0":
        return wrong(
            name,
            f"every executor holds GPUs, also during ETL ({_EXECUTORS_GPUS}={amount})",
            "remove it and spark.task.resource.gpu.amount from spark-defaults.conf: gangs request"
            " their GPUs themselves",
        )
    try:
        check_session({**defaults, **conf})
    except ConfigError:
        other = "other contexts cannot yet (use `hopsgpu submit`, or spark-conf/)"
    else:
        other = "so can every context that reads spark-defaults.conf"
    return ok(name, f"hopsgpu.session() can hold gangs; {other}")
