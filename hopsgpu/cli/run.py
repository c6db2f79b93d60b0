"""`hopsgpu run`: a script on a gang of GPUs, by the options of torchrun."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hopsgpu.cli.output import echo
from hopsgpu.cli.submit import Submission, submission_options
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    from hopsgpu.launcher.script_driver import ScriptJob

_IGNORED = "hopsgpu.ignored"
# Options of torchrun that need no value here: hopsgpu connects the ranks itself.
_IGNORED_WITH_VALUE = (
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank"),
    *("--master-addr", "--master-port", "--local-addr", "--monitor-interval", "--start-method"),
    *("--role", "--local-ranks-filter", "--logs-specs", "--event-log-handler"),
    *("--signals-to-handle", "--numa-binding"),
)
_IGNORED_SWITCHES = ("--standalone", "--run-path", "--virtual-local-rank")
_LOGS = "hopsgpu keeps the output of all ranks: `hopsgpu logs RUN --rank N` prints it"
# The spellings of what is refused, and the replacement.
_REFUSED = (
    (("--tee", "-t"), _LOGS),
    (("--redirects", "-r"), _LOGS),
    (("--log-dir",), f"{_LOGS}; --output DIR keeps files of the script"),
)


def _torchrun_options(command: Callable[..., None]) -> Callable[..., None]:
    hidden: dict[str, Any] = {"expose_value": False, "hidden": True}
    for name in _IGNORED_WITH_VALUE:
        command = click.option(name, callback=_ignore, **hidden)(command)
    for name in _IGNORED_SWITCHES:
        command = click.option(name, is_flag=True, callback=_ignore, **hidden)(command)
    for names, replacement in _REFUSED:
        refuse = functools.partial(_refuse, replacement)
        command = click.option(*names, callback=refuse, **hidden)(command)
    return command


def _ignore(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value:
        context.meta.setdefault(_IGNORED, []).append(parameter.opts[0])


def _refuse(
    replacement: str, context: click.Context, parameter: click.Parameter, value: Any
) -> None:
    if value is not None:
        raise ConfigError(f"{parameter.opts[0]} {value}: leave it out: {replacement}")


_OPTIONS = (
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as `python -m SCRIPT`."),
    click.option(
        "--no-python",
        "no_python",
        is_flag=True,
        help="SCRIPT is a program that is not Python.",
    ),
    click.option(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="Nodes; MIN:MAX for an elastic gang.  [default: 1]",
    ),
    click.option(
        "--nproc-per-node",
        "nproc_per_node",
        metavar="N|gpu|auto",
        help="Ranks on each node: a number, or as many as a node has GPUs (auto: else cores)."
        "  [default: 1]",
    ),
    click.option(
        "--workers",
        metavar="N|MIN:MAX",
        help="Ranks in all, in place of --nnodes and --nproc-per-node.",
    ),
    click.option(
        "--max-restarts",
        "max_restarts",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="How often all ranks start again after a failure.",
    ),
    click.option(
        "--gpus-per-worker",
        metavar="N",
        help="GPUs of each rank; 0 for CPUs, 0.5 for two ranks on a GPU.  [default: 1]",
    ),
    click.option("--memory-per-worker", metavar="SIZE", help="Memory of each rank.  [default: 4g]"),
    click.option(
        "--cores-per-worker",
        type=click.IntRange(1),
        metavar="N",
        help="Cores of each rank.  [default: the nodes' share of cores per GPU, less one]",
    ),
    click.option("--gpu-type", metavar="TYPE", help="Words of the GPUs' product name, as A100."),
    click.option(
        "--placement",
        type=click.Choice(["pack", "spread"]),
        help="As many ranks as fit into one container, or one on each node.  [default: pack if"
        " --nproc-per-node is more than 1, else left to YARN]",
    ),
    click.option(
        "--acquire-timeout",
        metavar="TIME",
        help="How long to wait for the GPUs; off for no bound.  [default: 10m]",
    ),
    click.option("--run-timeout", metavar="TIME", help="How long an attempt may take."),
    click.option(
        "--gpu-idle-timeout",
        metavar="TIME",
        help="End the run when all GPUs idle for so long.  [default: spark.hopsgpu.idle_timeout]",
    ),
    click.option(
        "--env", "envs", multiple=True, metavar="K=V", help="Variable of the ranks (repeatable)."
    ),
    click.option(
        "--data",
        "tables",
        multiple=True,
        metavar="[NAME=]URL",
        help="Parquet on the lake, for context().data (repeatable with names).",
    ),
    click.option(
        "--working-dir",
        metavar="DIR",
        help="Directory that travels to the ranks, which start in a copy of it.  [default: the"
        " current directory if the script is below it]",
    ),
    click.option("--model", metavar="NAME", help="Name of the model that --model-dir publishes."),
    click.option(
        "--model-dir", metavar="PATH", help="Directory in which the script leaves the model."
    ),
    click.option(
        "--checkpoint-dir",
        metavar="PATH",
        help="Directory of the script's snapshots: kept on the lake while it runs, and put back"
        " before it starts again.",
    ),
    click.option(
        "--tensorboard-dir", metavar="PATH", help="Directory of the script's TensorBoard files."
    ),
    click.option(
        "--output",
        "outputs",
        multiple=True,
        metavar="PATH",
        help="Another directory of the script to keep (repeatable): `hopsgpu runs files`.",
    ),
    click.option(
        "--resume",
        metavar="RUN",
        help="Continue from the checkpoints of a run; latest for the latest run of this --name.",
    ),
    click.option(
        "--independent-ranks",
        is_flag=True,
        help="Each rank trains by itself, and finds a world of one rank.",
    ),
)


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


# torchrun also accepts underscores between the words of an option.
_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda word: word.replace("_", "-"),
}


@click.command(context_settings=_SETTINGS)
@_run_options
@submission_options
@_torchrun_options
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, /, script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run a script on GPUs, by the options of torchrun.

    `hopsgpu run --nproc-per-node 4 train.py --epochs 3` runs train.py in four ranks.

    Arguments after SCRIPT are passed to the script. Its exit code is that of this command (128 and
    the number of a signal; 124 after --run-timeout). The GPUs are those of YARN, requested all at
    once, and given back at the end; without a Hadoop configuration the script runs on this machine.
    Options of torchrun about the rendezvous are accepted and ignored.
    """
    if ignored := context.meta.get(_IGNORED):
        echo(
            f"hopsgpu: {', '.join(ignored)}: ignored, because hopsgpu connects the ranks itself",
            is_error=True,
        )
    submission = {field.name: options.pop(field.name) for field in fields(Submission)}
    job = job_of(script, arguments, submission["name"], options)
    if _mode(submission) == "cluster":
        _submit(job, Submission(**submission))
    else:
        _run_here(job, Submission(**submission))


def job_of(
    script: str, arguments: tuple[str, ...], name: str | None, options: Mapping[str, Any]
) -> ScriptJob:
    """Return what the command's options mean.

    Raises:
        ConfigError: options contradict each other, or one has a wrong value.
    """
    from hopsgpu.launcher.script_driver import ScriptJob
    from hopsgpu.packaging.script import FILE, MODULE, PROGRAM

    if options["module"] and options["no_python"]:
        raise ConfigError("-m with --no-python: a module is Python; give one of the two")
    kind = MODULE if options["module"] else PROGRAM if options["no_python"] else FILE
    nodes, per_node, workers = _sizes(options)
    launch: dict[str, Any] = {
        "retries": options["max_restarts"],
        "placement": options["placement"] or ("pack" if per_node != 1 else None),
        "independent_ranks": options["independent_ranks"],
        "output_dirs": list(options["outputs"]),
    }
    for option in _PASSED:
        if options[option] is not None:
            launch[option] = options[option]
    if (gpus := options["gpus_per_worker"]) is not None:
        launch["gpus_per_worker"] = _number(gpus)
    if (timeout := options["acquire_timeout"]) is not None:
        launch["acquire_timeout"] = None if timeout == "off" else timeout
    if options["envs"]:
        launch["env_vars"] = dict(map(_variable, options["envs"]))
    if options["tables"]:
        launch["data"] = _tables(options["tables"])
    directory = _working_dir(kind, script, options["working_dir"])
    return ScriptJob(kind, script, arguments, directory, name, nodes, per_node, workers, launch)


_PASSED = (
    *("memory_per_worker", "cores_per_worker", "gpu_type", "run_timeout", "gpu_idle_timeout"),
    *("model", "model_dir", "checkpoint_dir", "tensorboard_dir", "resume"),
)


def _sizes(
    options: Mapping[str, Any],
) -> tuple[tuple[int, int], int | str, tuple[int, ...] | None]:
    """Return the numbers of nodes, the ranks of each, and the workers if those were given."""
    workers, nnodes, per_node = options["workers"], options["nnodes"], options["nproc_per_node"]
    if workers is not None and (nnodes is not None or per_node is not None):
        raise ConfigError(
            f"--workers {workers} with --nnodes or --nproc-per-node: both say how many ranks there"
            " are; give one"
        )
    nodes = _range("--nnodes", nnodes or "1")
    ranks: int | str = per_node or "1"
    if ranks not in ("gpu", "auto"):
        numbers = _range("--nproc-per-node", str(ranks))
        if len(numbers) > 1:
            raise ConfigError(f"--nproc-per-node {ranks}: must be a number, gpu or auto")
        ranks = numbers[0]
    sizes = None if workers is None else _range("--workers", workers)
    return (nodes[0], nodes[-1]), ranks, sizes


def _range(option: str, text: str) -> tuple[int, ...]:
    from hopsgpu.launcher.script_driver import sizes_of

    try:
        return tuple(sizes_of(text))
    except ValueError as error:
        expected = "a number ≥ 1" if option == "--nproc-per-node" else "a number ≥ 1, or MIN:MAX"
        also = ", gpu or auto" if option == "--nproc-per-node" else ""
        raise ConfigError(f"{option} {text}: must be {expected}{also}") from error


def _number(text: str) -> float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError as error:
        raise ConfigError(
            f"--gpus-per-worker {text}: must be a number of GPUs, or a fraction such as 0.5"
        ) from error


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--env {text}: must be NAME=VALUE")
    return name, value


def _tables(texts: tuple[str, ...]) -> str | dict[str, str]:
    """Return the data of `--data`: one URL, or several by name."""
    named = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if equals and name.isidentifier():
            named[name] = url
        elif len(texts) == 1:
            return text
        else:
            raise ConfigError(f"--data {text}: several tables need names, as train={text}")
    return named


def _working_dir(kind: str, script: str, option: str | None) -> str | None:
    """Return the directory that travels: the option's, else the current one with the script."""
    from importlib.machinery import PathFinder

    from hopsgpu.packaging.script import FILE, MODULE

    current = Path.cwd()
    if option is not None:
        return str(Path(option).absolute())
    if kind == FILE:
        if Path(script).resolve().is_relative_to(current.resolve()):
            return str(current)
        echo(
            "hopsgpu: the current directory does not travel, because the script is not below it:"
            " --working-dir . sends it",
            is_error=True,
        )
        return None
    if kind == MODULE:
        spec = PathFinder.find_spec(script.partition(".")[0], [str(current)])
        return None if spec is None else str(current)
    return str(current) if (current / script).is_file() else None


def _mode(submission: Mapping[str, Any]) -> str:
    from hopsgpu.backends.spark.submit_command import deploy_mode, parse_conf
    from hopsgpu.storage.hadoop_conf import is_configured
    from hopsgpu.storage.spark_defaults import spark_defaults

    conf = parse_conf(submission["confs"])
    requested, is_detached = submission["deploy_mode"], submission["detach"]
    if not is_configured(os.environ) and not (requested or is_detached):
        return "client"
    return deploy_mode(requested, conf, is_detached, spark_defaults(os.environ))


def _run_here(job: ScriptJob, submission: Submission) -> None:
    from dataclasses import replace

    from hopsgpu.backends.spark.submit_command import check_queue_option, image_settings
    from hopsgpu.cluster_managers.manager_table import default_master
    from hopsgpu.launcher.script_driver import plan_job, run_job

    if submission.proxy_user is not None:
        from hopsgpu.storage.identity import PROXY_USER

        os.environ[PROXY_USER] = submission.proxy_user
    conf = submission.properties()
    master = default_master(conf, os.environ)
    conf = {**image_settings(conf, master), **conf}
    if submission.queue is not None:
        check_queue_option(submission.queue, master)
        conf["spark.yarn.queue"] = submission.queue
    envs = submission.python_envs
    if envs:
        env = envs[0] if len(envs) == 1 else list(envs)
        job = replace(job, options={**job.options, "python_env": env})
    if submission.dry_run:
        echo(plan_job(job, conf))
        return
    sys.exit(run_job(job, conf))


def _submit(job: ScriptJob, submission: Submission) -> None:
    """Submit the driver to YARN, with the script's files on the lake."""
    from dataclasses import replace

    from hopsgpu.cli.signals import exit_on_signals
    from hopsgpu.core.cache_directory import cache_directory
    from hopsgpu.launcher.script_driver import driver_source
    from hopsgpu.launcher.scripts import default_script_name, find_script, ready_script
    from hopsgpu.packaging.script import KeptDirectories
    from hopsgpu.packaging.working_dir import MAX_BYTES
    from hopsgpu.units import parse_memory

    options, properties = job.options, submission.effective_properties()
    kept = KeptDirectories(
        options.get("model_dir"),
        options.get("checkpoint_dir"),
        options.get("tensorboard_dir"),
        tuple(options["output_dirs"]),
    )
    limit = properties.get("spark.hopsgpu.working_dir.limit")
    script = find_script(
        job.request,
        job.args,
        kept,
        parse_memory(limit, "spark.hopsgpu.working_dir.limit") if limit else MAX_BYTES,
    )
    for warning in script.warnings:
        echo(f"hopsgpu: {warning}", is_error=True)
    name = job.name or default_script_name(job.request)
    if submission.dry_run:
        echo(f"hopsgpu: --dry-run sends nothing: {script.bytes} bytes would travel", is_error=True)
        ready = None
    else:
        with exit_on_signals():
            ready = ready_script(script, submission.root(), threading.Event()).as_fields()
    source = driver_source(replace(job, name=name, ready=ready, working_dir=None))
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    directory = cache_directory(os.environ) / "run" / digest
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    driver = directory / "run_script.py"
    driver.touch(mode=0o600)
    driver.write_text(source, encoding="utf-8")
    replace(submission, name=name).run(str(driver))
