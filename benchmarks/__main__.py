"""Run the benchmarks, or those that are named; print tables, write bench.json and bench.md.

The page bench.md has the tables, and what became worse since the run that is committed as
benchmarks/committed.json; `--commit` replaces that run's figures by those of this run.

`python -m benchmarks [release | acquisition | cold | search | warm | contention | stores | data |
small | planning | score | script | channel | output | images | trials | elastic | replay | scale |
secure] …`, and `python -m benchmarks [warm | release | cold] … --master standalone`, and on
Kubernetes the same and `ray`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

import hopsgpu
from benchmarks import (
    channel,
    contention,
    data,
    elastic,
    images,
    launches,
    many_trials,
    output,
    planning,
    ray_train,
    replay,
    scale,
    score,
    script,
    search,
    secure,
    small_files,
    stores,
    warm,
)
from benchmarks.report import Recorder, compare, make_page
from hopsgpu import devcluster
from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.layout import node_names
from hopsgpu.devcluster.standalone import GPU_RESOURCE

COMMITTED = Path(__file__).with_name("committed.json")
MASTERS = ("yarn", "standalone", "kubernetes")
# Which of them want an application of ours, a cluster, or neither.
IN_SESSION: Mapping[str, Callable[[SparkSession], object]] = {
    "release": launches.release,
    "acquisition": launches.acquisition,
    "cold": warm.cold,
    "search": search.measure,
}
ON_CLUSTER: Mapping[str, Callable[[], object]] = {
    "warm": warm.measure,
    "contention": contention.measure,
    "stores": stores.measure,
    "data": data.measure,
    "small": small_files.measure,
    "planning": planning.measure,
    "score": score.measure,
    "script": script.measure,
}
ALONE: Mapping[str, Callable[[], object]] = {
    "channel": channel.measure,
    "output": output.measure,
    "images": images.measure,
    "trials": many_trials.measure,
    "elastic": elastic.measure,
    "replay": replay.measure,
    "scale": scale.measure,
    # Needs a KDC.
    "secure": secure.measure,
}


# Which of them also run without YARN, and which only on Kubernetes.
WITHOUT_YARN = ("warm", "release", "cold")
ON_KUBERNETES: Mapping[str, Callable[[], object]] = {"ray": ray_train.measure}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark; by default all")
    parser.add_argument("--master", choices=MASTERS, default="yarn")
    parser.add_argument(
        "--commit",
        action="store_true",
        help=f"write the figures to {COMMITTED.name}, with which later runs are compared",
    )
    options = parser.parse_args(arguments)
    names: list[str] = options.names
    is_on_yarn = options.master == "yarn"
    is_kubernetes = options.master == "kubernetes"
    known = (*IN_SESSION, *ON_CLUSTER, *ALONE) if is_on_yarn else WITHOUT_YARN
    known += tuple(ON_KUBERNETES) if is_kubernetes else ()
    if unknown := set(names).difference(known):
        where = "" if is_on_yarn else f" with --master {options.master}"
        sys.exit(
            f"no such benchmark{where}: {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    recorder, began = Recorder(sys.stdout), time.monotonic()
    with contextlib.redirect_stdout(recorder):
        figures = _measure(set(names or known), options.master)
    seconds = time.monotonic() - began
    earlier = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    of_master = earlier.get(options.master)
    changes = None if of_master is None else compare(figures, of_master)
    Path("bench.json").write_text(json.dumps(figures, indent=1) + "\n")
    Path("bench.md").write_text(make_page(recorder.text, changes, seconds))
    print("\nwritten to bench.json and bench.md")
    for change in changes or ():
        if change.is_worse:
            print(f"worse: {change.name}: {change.now:.4g}, before {change.before:.4g}")
    if options.commit:
        earlier[options.master] = {**(of_master or {}), **figures}
        COMMITTED.write_text(json.dumps(earlier, indent=1) + "\n")
        print(f"committed.json has the figures of {', '.join(figures)}")


def _measure(wanted: set[str], master: str) -> dict[str, object]:
    is_standalone, is_kubernetes = master == "standalone", master == "kubernetes"
    figures: dict[str, object] = {}
    on_cluster = {**ON_CLUSTER, **ON_KUBERNETES}
    if wanted & {*IN_SESSION, *on_cluster}:
        with tempfile.TemporaryDirectory(prefix="hopsgpu-bench-") as directory:
            state = Path(directory) / "cluster"
            conf = _numbered_gpus(Path(directory)) if is_standalone else None
            try:
                devcluster.up(
                    state,
                    is_standalone=is_standalone or None,
                    is_kubernetes=is_kubernetes or None,
                    conf=conf,
                )
                os.environ.update(devcluster.environment(state))
                figures |= {n: work() for n, work in on_cluster.items() if n in wanted}
                figures |= _in_session(wanted)
            finally:
                devcluster.down(state)
    figures |= {name: work() for name, work in ALONE.items() if name in wanted}
    return figures


def _numbered_gpus(directory: Path) -> dict[str, object]:
    """Return the properties of Workers that list their GPUs by number.

    TorchDistributor refuses the UUIDs that `spark-scripts/worker-gpus` lists.
    """
    size = ClusterSpec()
    addresses = [str(number) for number in range(size.gpus_per_node)]
    script = directory / "numbered-gpus"
    answer = json.dumps({"name": "gpu", "addresses": addresses})
    script.write_text(f"#!/bin/sh\necho '{answer}'\n")
    script.chmod(0o755)
    discovery = {f"{GPU_RESOURCE}.discoveryScript": str(script)}
    return {"nodes": dict.fromkeys(node_names(size.nodes), discovery)}


def _in_session(wanted: set[str]) -> dict[str, object]:
    if not wanted & set(IN_SESSION):
        return {}
    spark = hopsgpu.session("bench")
    try:
        return {name: work(spark) for name, work in IN_SESSION.items() if name in wanted}
    finally:
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
