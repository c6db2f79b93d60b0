"""`hopsgpu submit`: spark-submit with what a gang needs."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import signal
import sys
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from hopsgpu.cli.output import echo
from hopsgpu.cli.signals import exit_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hopsgpu.backends.spark.submit_command import SubmitJob
    from hopsgpu.cluster_managers.manager import ClusterManager
    from hopsgpu.cluster_managers.submitted_drivers import DriverState, SubmittedDrivers
    from hopsgpu.storage.lake import LakePath

_PYTHON_ENV = "spark.hopsgpu.python_env"
_IDLE_TIMEOUT = "spark.hopsgpu.idle_timeout"
_ROOT = "spark.hopsgpu.root"
_ENDS = {"allow_interspersed_args": False}


_OPTIONS = (
    click.option(
        "--master",
        metavar="URL",
        help="yarn, spark://HOST:PORT of a standalone master, or k8s://https://HOST:PORT of"
        " Kubernetes.  [default: spark.master of spark-defaults.conf, else yarn]",
    ),
    click.option(
        "--deploy-mode",
        type=click.Choice(["client", "cluster"]),
        help="Run the driver here (client) or in the cluster.  [default: cluster with --detach,"
        " else spark.submit.deployMode, else client]",
    ),
    click.option(
        "--queue",
        metavar="Q",
        help="YARN queue of the application.  [default: spark.yarn.queue, else root.default]",
    ),
    click.option(
        "--name",
        metavar="N",
        help="Name of the application.  [default: spark.app.name, else the script's file name]",
    ),
    click.option(
        "--conf", "confs", multiple=True, metavar="K=V", help="Set a Spark property (repeatable)."
    ),
    click.option(
        "--principal",
        metavar="P",
        help="Kerberos principal of the application; needs --keytab.  [default:"
        " spark.kerberos.principal, else none]",
    ),
    click.option(
        "--keytab",
        metavar="FILE",
        help="Keytab of the principal: no kinit is needed, and runs may last longer than tokens"
        " do.  [default: spark.kerberos.keytab, else none]",
    ),
    click.option(
        "--python-env",
        "python_envs",
        multiple=True,
        metavar="ENV",
        help="Python environment of the ranks whose launch names none: a requirements file,"
        " packages (humanize==4.9; separate several by commas, or repeat the option), a directory,"
        " a packed archive or a conda environment of this machine. It is stored on the lake."
        "  [default: spark.hopsgpu.python_env, else the executors' Python]",
    ),
    click.option(
        "--image",
        metavar="IMAGE",
        help="Container image of the executors, and in cluster mode of the driver: NAME[:TAG], by"
        " YARN's Docker runtime, or on Kubernetes.  [default: spark.hopsgpu.image, else none]",
    ),
    click.option(
        "--detach",
        is_flag=True,
        help="Run the driver in the cluster, print the application's ID once it is accepted, and"
        " return.  [default: wait for the application's end]",
    ),
    click.option(
        "--proxy-user",
        metavar="USER",
        help="Act for another user, as gateways do that YARN and HDFS allow it to.  [default:"
        " HADOOP_PROXY_USER, else nobody]",
    ),
    click.option(
        "--dry-run", is_flag=True, help="Print the spark-submit command line instead of running it."
    ),
)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The options of a command that submits an application; `submission_options` adds them."""

    master: str | None
    deploy_mode: str | None
    queue: str | None
    name: str | None
    confs: tuple[str, ...]
    principal: str | None
    keytab: str | None
    python_envs: tuple[str, ...]
    image: str | None
    detach: bool
    proxy_user: str | None
    dry_run: bool

    def run(
        self, script: str, arguments: tuple[str, ...] = (), more: Mapping[str, str] | None = None
    ) -> None:
        """Submit a script.

        Args:
            script: path of the script.
            arguments: its arguments.
            more: Spark properties that override those of the options.

        Raises:
            ConfigError: an option is invalid, or the application cannot hold gangs.
        """
        from hopsgpu.backends.spark.submit_command import SubmitJob
        from hopsgpu.storage.identity import PROXY_USER

        conf = {**self.properties(), **(more or {})}
        tag = None if self.dry_run else f"hopsgpu-submit-{secrets.token_hex(8)}"
        if self.proxy_user is not None:
            # This process's clients and spark-submit read the variable.
            os.environ[PROXY_USER] = self.proxy_user
        job = SubmitJob(
            script, arguments, self.deploy_mode, self.queue, self.name, conf, self.detach, tag
        )
        # A single value may have any form; several values are a list of packages.
        envs = self.python_envs
        _run(job, envs[0] if len(envs) == 1 else envs or None, self.dry_run)

    def properties(self) -> dict[str, str]:
        """Return the Spark properties that the options set.

        Raises:
            ConfigError: one has a wrong form.
        """
        from hopsgpu.backends.spark.container_image import IMAGE
        from hopsgpu.backends.spark.submit_command import parse_conf
        from hopsgpu.cluster_managers.manager_table import MASTER
        from hopsgpu.core.image_names import check_image_name

        conf = parse_conf(self.confs)
        if self.master is not None:
            conf[MASTER] = self.master
        for option, value in (("principal", self.principal), ("keytab", self.keytab)):
            if value is not None:
                conf[f"spark.kerberos.{option}"] = value
        if self.image is not None:
            check_image_name(self.image, "--image")
            conf[IMAGE] = self.image
        return conf

    def effective_properties(self) -> dict[str, str]:
        """Return the Spark properties of the options and of spark-defaults.conf.

        Raises:
            ConfigError: as `properties`.
        """
        from hopsgpu.storage.spark_defaults import spark_defaults

        return {**spark_defaults(os.environ), **self.properties()}

    def root(self) -> LakePath:
        """Return the root on the lake, once this user's credentials are known.

        Raises:
            ConfigError: there is no Hadoop configuration, or no ticket.
        """
        from hopsgpu.storage.hadoop_conf import HadoopConf
        from hopsgpu.storage.identity import PROXY_USER, ensure_credentials

        if self.proxy_user is not None:
            os.environ[PROXY_USER] = self.proxy_user
        properties = self.effective_properties()
        ensure_credentials(HadoopConf.load_hdfs(os.environ).get, properties.get, os.environ)
        return _root(properties)


def submission_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Submission` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(context_settings=_ENDS)
@submission_options
@click.option(
    "--idle-timeout",
    metavar="TIME",
    help="End a run whose GPUs all idle for so long while its function runs (30m; off for never),"
    " unless its launch has a gpu_idle_timeout of its own.  [default: spark.hopsgpu.idle_timeout,"
    " else off]",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def submit(
    script: str, arguments: tuple[str, ...], idle_timeout: str | None, **options: Any
) -> None:
    """Run a script as a Spark application that can hold gangs of GPUs.

    Arguments after SCRIPT are passed to the script. The package, the discovery script and the
    modules beside the script are shipped; hopsgpu need not be installed on the nodes. The exit
    code is that of the script. Ending this command (SIGTERM, Ctrl-C) ends the application
    and releases its GPUs, except with --detach.
    """
    from hopsgpu.units import parse_duration_or_off

    more = {}
    if idle_timeout is not None:
        parse_duration_or_off(idle_timeout, "--idle-timeout")
        more[_IDLE_TIMEOUT] = idle_timeout
    Submission(**options).run(script, arguments, more)


def _run(job: SubmitJob, python_env: str | Sequence[str] | None, dry_run: bool) -> None:
    from hopsgpu.backends.spark.pyspark_archives import with_bytecode
    from hopsgpu.backends.spark.spark_kinds import spark_kind_of
    from hopsgpu.backends.spark.submit_arguments import ship, submit_arguments
    from hopsgpu.backends.spark.submit_command import find_spark_submit, plan_submission
    from hopsgpu.cluster_managers.manager_table import MASTER, required_kind
    from hopsgpu.cluster_managers.yarn.manager import YarnManager
    from hopsgpu.cluster_managers.yarn.resource_manager import check_driver_credentials
    from hopsgpu.core.cache_directory import cache_directory
    from hopsgpu.packaging.python_env.kinds import recipe_for
    from hopsgpu.storage.hadoop_conf import HadoopConf
    from hopsgpu.storage.identity import ensure_credentials
    from hopsgpu.storage.spark_defaults import spark_defaults

    defaults = spark_defaults(os.environ)
    if python_env is not None:
        recipe_for(python_env)
    plan = plan_submission(job, defaults, os.environ, sys.executable)
    binary = find_spark_submit(os.environ)
    manager = None
    if not dry_run:
        kind = required_kind(plan.properties[MASTER])
        manager = kind.connect(plan.properties, os.environ)
        ensure_credentials(HadoopConf.load_hdfs(os.environ).get, plan.properties.get, os.environ)
        if isinstance(manager, YarnManager) and plan.mode == "cluster":
            check_driver_credentials(manager.resource_manager, plan.properties.get)
        manager.check_submission()
    if python_env is not None:
        # On a node of YARN, the path would name another file.
        url = (_planned_url if dry_run else _on_lake)(python_env, plan.properties)
        job = replace(job, conf={**job.conf, _PYTHON_ENV: url})
        plan = plan_submission(job, defaults, os.environ, sys.executable)
    prepare = spark_kind_of(plan.properties[MASTER]).prepare_driver
    with contextlib.ExitStack() as stack:
        if prepare is not None and plan.mode == "cluster":
            root = functools.partial(_root, plan.properties)
            # The files of an application that a signal ends are removed, too.
            stack.enter_context(exit_on_signals(signal.SIGINT))
            more = stack.enter_context(
                prepare(plan.properties, root, manager, job.tag, job.is_detached)
            )
            job = replace(job, conf={**job.conf, **more})
            plan = plan_submission(job, defaults, os.environ, sys.executable)
        shipped = ship(
            cache_directory(os.environ) / "submit", plan.properties, [job.script, *job.arguments]
        )
        command = [str(binary.absolute()), *submit_arguments(plan.arguments, defaults, shipped)]
        if manager is None:
            echo(shlex.join(command))
        elif plan.mode == "client":
            # spark-submit replaces this process, and so gets its signals and output.
            sys.stdout.flush()
            sys.stderr.flush()
            os.execve(binary, command, with_bytecode(os.environ))
        else:
            _submit_driver(job, command, with_bytecode(os.environ), manager, plan.properties)


def _submit_driver(
    job: SubmitJob,
    command: Sequence[str],
    environ: Mapping[str, str],
    manager: ClusterManager,
    properties: Mapping[str, str],
) -> None:
    """Submit in cluster mode; wait for the end, or print what to do with a detached application."""
    drivers = manager.submitted_drivers()
    # Settings with cluster mode were refused before if this cluster manager runs no drivers.
    assert drivers is not None, manager.title
    standing = _attend(job, command, environ, drivers)
    if job.is_detached:  # a closed output must not end the application
        echo(standing.id)
        _say_next_steps(standing.id, properties.get(_ROOT), drivers.end_command(standing.id))
    elif not standing.has_succeeded:
        sys.exit(standing.exit_code or 1)


def _on_lake(python_env: str | Sequence[str], properties: Mapping[str, str]) -> str:
    """Return the URL of a Python environment on the lake; create it if missing.

    Args:
        python_env: as for `launch`.
        properties: properties of the application, which may name its root on the lake.

    Raises:
        ConfigError, StoreError: as `put_on_lake`.
    """
    from hopsgpu.packaging.python_env.builder import put_on_lake, warnings_of
    from hopsgpu.packaging.python_env.kinds import recipe_for

    root, wanted = _root(properties), recipe_for(python_env)
    _say(f"looking for the Python environment ({wanted.name}) on the lake, to create it if missing")
    for warning in warnings_of(wanted):
        _say(warning)
    # A running pip ends with this command.
    with exit_on_signals():
        return put_on_lake(python_env, root, threading.Event())


def _planned_url(python_env: str | Sequence[str], properties: Mapping[str, str]) -> str:
    """Return the URL that `_on_lake` would return; tell the user that it does not create it.

    Raises:
        ConfigError: as `url_on_lake`, or the location of the lake is unknown.
    """
    from hopsgpu.packaging.python_env.builder import url_on_lake
    from hopsgpu.packaging.python_env.kinds import recipe_for
    from hopsgpu.packaging.python_env.recipes import StoredArchive

    url, wanted = (
        url_on_lake(python_env, _root(properties), threading.Event()),
        recipe_for(python_env),
    )
    if not isinstance(wanted, StoredArchive):
        _say(
            f"--dry-run does not create the Python environment ({wanted.name}): `hopsgpu submit`"
            f" creates it at {url} if it is missing; until then, launches of the application fail"
        )
    return url


def _root(properties: Mapping[str, str]) -> LakePath:
    """Return the root of environments on the lake.

    Raises:
        ConfigError: there is no Hadoop configuration, and a directory of this machine is not a
            lake.
    """
    from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured
    from hopsgpu.storage.lake import LakePath
    from hopsgpu.storage.lake_root import default_root

    if named := properties.get(_ROOT):
        return LakePath(named)
    if not is_configured(os.environ):
        HadoopConf.load()
    return LakePath(default_root(os.environ))


def _say(text: str) -> None:
    echo(f"hopsgpu: {text}", is_error=True)


def _attend(
    job: SubmitJob,
    command: Sequence[str],
    environ: Mapping[str, str],
    drivers: SubmittedDrivers,
) -> DriverState:
    """Submit in cluster mode, and wait for the end unless the job is detached."""
    from hopsgpu.backends.spark.cluster_mode import SubmittedApplication

    attended = SubmittedApplication(drivers, job.tag or "", _say)
    with exit_on_signals(signal.SIGINT), attended.end_on_error():
        standing = attended.submit(command, environ)
        if not job.is_detached:
            standing = attended.follow(standing)
            attended.report_end(standing)
    return standing


def _say_next_steps(application_id: str, root: str | None, end_command: str) -> None:
    """Tell how to watch and end a detached application, whose run has no ID yet.

    Args:
        root: root of runs on the lake that the application was given; None for the user's own.
        end_command: the command that ends the application.
    """
    option = "" if root is None else f" --root {shlex.quote(root)}"
    for purpose, command in (
        ("its runs", f"hopsgpu runs{option}"),
        ("its output", f"hopsgpu logs{option} -f {application_id}"),
        ("cancel its run", f"hopsgpu runs{option} cancel {application_id}"),
        ("end it", end_command),
    ):
        _say(f"{purpose + ':':<16}{command}")
