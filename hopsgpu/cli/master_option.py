"""The option of commands that ask a cluster manager without a session."""

from __future__ import annotations

import click

master_option = click.option(
    "--master",
    metavar="URL",
    help="yarn, spark://HOST:PORT of a standalone master, or k8s://https://HOST:PORT of Kubernetes."
    "  [default: spark.master of spark-defaults.conf, else the YARN of HADOOP_CONF_DIR]",
)
