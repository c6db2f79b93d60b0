"""Checks of the lake, and of a Hadoop configuration that only the lake needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.doctor.machine_checks import HadoopClient
from hopsgpu.doctor.report import Check, ok, unknown, wrong

HADOOP_CONF = "hadoop conf"


@dataclass(frozen=True)
class LakeFacts:
    """The result of writing to the root of runs and models.

    Attributes:
        root: its URL.
        problem: why it failed, or "".
        seconds: duration; None if the lake did not answer in time.
    """

    root: str
    problem: str
    seconds: float | None


def check_lake(facts: LakeFacts, name: str = "hdfs") -> Check:
    """Check whether models can be published, which writes and renames files."""
    elsewhere = "set HOPSGPU_ROOT or spark.hopsgpu.root to a directory of your own"
    if facts.seconds is None:
        return unknown(name, f"{facts.root} did not answer: {facts.problem}", elsewhere)
    if facts.problem:
        return wrong(name, facts.problem, elsewhere)
    return ok(name, f"{facts.root}: written, renamed and read back in {facts.seconds:.1f} s")


def check_hadoop_conf(
    client: HadoopClient,
    root: str,
    *,
    is_kerberized: bool,
    manager: str,
    shared: tuple[str, str],
) -> Check:
    """Check the Hadoop configuration of a cluster manager on which only a lake on HDFS needs it.

    Args:
        root: URL of the lake.
        manager: what the cluster manager is, such as "a standalone master".
        shared: who must share a local directory in place of a lake, and the remedy.
    """
    if client.problem:
        return wrong(HADOOP_CONF, client.problem, "correct it, or unset HADOOP_CONF_DIR")
    where = ":".join(client.places) or "HADOOP_CONF_DIR is not set"
    if is_kerberized:
        return wrong(
            HADOOP_CONF,
            f"{where} requires Kerberos, and {manager} passes no tokens to executors",
            "use YARN, or a Hadoop configuration without Kerberos",
        )
    if root.startswith("file:"):
        who, fix = shared
        return unknown(
            HADOOP_CONF,
            f"{where}: runs go to the local directory {root}, which {who} must share",
            fix,
        )
    return ok(HADOOP_CONF, f"{where}: runs go to {root}")
