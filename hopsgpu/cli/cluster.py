"""`hopsgpu cluster`: a real YARN, standalone cluster or Kubernetes, and HDFS on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hopsgpu.cli.command_group import Commands
from hopsgpu.cli.lake_root import json_option
from hopsgpu.cli.output import echo
from hopsgpu.cli.param_types import Seconds
from hopsgpu.cli.signals import exit_on_signals

if TYPE_CHECKING:
    from hopsgpu.devcluster import ClusterStatus

_dir: Callable[[Any], Any] = click.option(
    "--dir", "dir_", metavar="D", help="Directory of the cluster.  [default: ~/.hopsgpu/cluster]"
)


@click.group(cls=Commands)
def cluster() -> None:
    """Run a real YARN, Spark standalone cluster or Kubernetes, and HDFS on this machine.

    The clusters are for development. Several can run side by side, each in its own directory
    (--dir). They listen only on addresses of this machine: loopback ones without authentication,
    or with Kubernetes those of a network between its nodes.
    """


@cluster.command()
@_dir
@click.option("--nodes", type=int, metavar="N", help="Number of nodes.  [default: 2]")
@click.option(
    "--gpus-per-node",
    type=int,
    metavar="K",
    help="GPUs of each node: real ones if nvidia-smi works here, else simulated.  [default: 2]",
)
@click.option(
    "--hadoop",
    metavar="VERSION",
    help="Hadoop of the daemons, such as 3.3.6 or 3.4.2.  [default: the one that PySpark includes]",
)
@click.option(
    "--kerberos", is_flag=True, help="With a KDC of its own; everything requires tickets."
)
@click.option("--privacy", is_flag=True, help="With Kerberos: encrypt HDFS and Hadoop's RPC.")
@click.option("--simple-web", is_flag=True, help="With Kerberos: web addresses without it.")
@click.option(
    "--token-lifetimes",
    nargs=2,
    metavar="RENEW MAX",
    type=click.FloatRange(60),
    help="With Kerberos: seconds after which an HDFS token must be renewed, and after which it can"
    " no longer be.  [default: 1 and 7 days]",
)
@click.option(
    "--https", is_flag=True, help="Web addresses by HTTPS, certified by an authority of its own."
)
@click.option(
    "--namenode-ha", is_flag=True, help="A second NameNode, which takes over when one dies."
)
@click.option(
    "--resourcemanager-ha",
    is_flag=True,
    help="A second ResourceManager, which takes over when one dies.",
)
@click.option(
    "--preemption",
    is_flag=True,
    help="The queues default and training, with half of the cluster each, take it back from each"
    " other.",
)
@click.option(
    "--docker",
    "has_docker",
    is_flag=True,
    help="Containers can run in Docker, in a dockerd of this cluster; needs root and the packages"
    " docker.io, containerd and runc.",
)
@click.option(
    "--mig",
    metavar="PROFILE:COUNT[,...]",
    help="Divide each GPU, which is then simulated, into MIG devices, as in 1g.10gb:7 or"
    " 3g.20gb:1,1g.5gb:4. YARN counts each of them as a GPU.",
)
@click.option(
    "--standalone",
    "is_standalone",
    is_flag=True,
    help="A Spark Master and Workers, from this Python's PySpark, in place of YARN.",
)
@click.option(
    "--master-ha",
    "has_master_ha",
    is_flag=True,
    help="With --standalone: a second Master, which takes over when the first one dies.",
)
@click.option(
    "--kubernetes",
    "is_kubernetes",
    is_flag=True,
    help="A Kubernetes in place of YARN, in a network of its own; needs root, containerd, and the"
    " programs that `make kubernetes` builds.",
)
@click.option("--conf", metavar="FILE", help="YAML file of extra Hadoop properties, by site file.")
@click.option(
    "--timeout",
    type=Seconds(1.0),
    metavar="SECONDS",
    help="Give up after this time.  [default: wait as long as the daemons make progress]",
)
def up(dir_: str | None, **options: Any) -> None:
    """Start a cluster and wait until it is ready.

    If daemons already run, also after an `up` that failed or was interrupted, start only the
    missing ones. HDFS keeps its files from before the last `down`; the nodes, GPUs and --conf are
    those of the first `up` after it.
    """
    from hopsgpu import devcluster as library

    # A flag that is not given requests the setting of the cluster that already runs.
    settings: dict[str, Any] = {
        name: None if value is False else value for name, value in options.items()
    }
    with exit_on_signals(), _hint_after_failure(dir_):
        library.up(dir_, **settings, say=click.echo)
    echo(f'to use it in this shell: eval "$(hopsgpu cluster env{_option(dir_)})"')


def _option(directory: str | None) -> str:
    return "" if directory is None else f" --dir {shlex.quote(directory)}"


@contextmanager
def _hint_after_failure(directory: str | None) -> Iterator[None]:
    """Say how to continue if an error or an interrupt leaves daemons running."""
    from hopsgpu.devcluster.layout import ClusterLayout
    from hopsgpu.devcluster.state import load

    try:
        yield
    except BaseException:
        state = load(ClusterLayout.at(directory))
        if state and state.is_running:
            option = _option(directory)
            echo(
                f"daemons keep running: `hopsgpu cluster up{option}` continues with them,"
                f" `hopsgpu cluster down{option}` stops them"
            )
        raise


@cluster.command()
@_dir
def down(dir_: str | None) -> None:
    """Stop every process of a cluster.

    The directory stays, with the HDFS files and the logs; remove the directory to delete them.
    """
    from hopsgpu import devcluster as library

    library.down(dir_, say=click.echo)


@cluster.command()
@_dir
@json_option
def status(dir_: str | None, as_json: bool) -> None:
    """Show the daemons, the nodes and their GPUs; exit with 0 if the whole cluster is up."""
    from hopsgpu import devcluster as library

    state = library.status(dir_)
    echo(json.dumps(state.to_json(), indent=2) if as_json else describe(state))
    sys.exit(0 if state.healthy else 1)


@cluster.command()
@_dir
def env(dir_: str | None) -> None:
    """Print the variables that a shell needs to use a cluster: eval "$(hopsgpu cluster env)"."""
    from hopsgpu import devcluster as library

    echo(exports(library.environment(dir_)))


def exports(environ: Mapping[str, str]) -> str:
    """Return shell commands that export variables, whatever characters their values have."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environ.items())


def describe(state: ClusterStatus) -> str:
    if not state.daemons:
        return f"no cluster runs in {state.directory}"
    rows = [("DAEMON", "PID", "STATE", "RPC", "WEB", "LOG")]
    for d in state.daemons:
        rows.append((d.name, str(d.pid), "alive" if d.alive else "dead", d.rpc, d.web, d.log))
    lines = [f"cluster in {state.directory}", "", *_table(rows), ""]
    if state.resourcemanager_answers:
        rows = [("NODE", "STATE", "GPUS", "MEMORY", "CORES", "")]
        for n in state.nodes:
            memory = f"{n.memory_used / 1024:.1f} of {n.memory / 1024:.1f} GiB"
            used = (f"{n.gpus_used} of {n.gpus}", memory, f"{n.cores_used} of {n.cores}")
            rows.append((n.name, n.state, *used, ""))
        lines += _table(rows)
        lines.append(f"GPUs: {state.gpus_used} of {state.gpus_total} used ({state.gpus})")
    elif state.masters:
        lines.append(f"no Master is ALIVE; GPUs: {state.gpus}")
    else:
        lines.append(f"the ResourceManager does not answer; GPUs: {state.gpus}")
    if state.masters:
        states = (f"{name} {role or 'does not answer'}" for name, role in state.masters.items())
        lines.append(f"Masters: {', '.join(states)}")
    return "\n".join(lines)


def _table(rows: list[tuple[str, str, str, str, str, str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
