"""`hopsgpu doctor` on a cluster with broken nodes, which is made of the administrator's example."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.backends.spark.submit_arguments import pack
from hopsgpu.devcluster import admin
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.lake import LakePath
from tests.cluster.test_doctor import ROOT, doctor, own_script, states, submitted

NODES, GPUS = 3, 4
QUEUE = ("--queue", "training")
FAILING = """#!/bin/sh
echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'
exit 9
"""
# Longer than the doctor waits, and shorter than the discovery script does.
SLOW_SECONDS, PATIENCE_SECONDS = 58, 50


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of the example that the development cluster is not made of."""
    path = tmp_path_factory.mktemp("doctor")
    conf = {"capacity-scheduler": admin.yarn_file("capacity-scheduler-gpu-shares")}
    try:
        devcluster.up(path, nodes=NODES, gpus_per_node=GPUS, conf=conf)
        yield path
    finally:
        devcluster.down(path)


@pytest.fixture(scope="module")
def env(directory: Path) -> Iterator[dict[str, str]]:
    """The cluster's variables, set in this process too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in devcluster.environment(directory).items():
            patch.setenv(name, value)
        yield dict(os.environ)


@contextlib.contextmanager
def nvidia_smi(directory: Path, node: str, text: str) -> Iterator[None]:
    """While inside, another one on a node; {} is the node's own."""
    smi = directory / "nodes" / node / "bin" / "nvidia-smi"
    own = smi.with_name("nvidia-smi-own")
    smi.rename(own)
    try:
        smi.write_text(text.format(own))
        smi.chmod(0o755)
        yield
    finally:
        own.rename(smi)


def test_queues_get_the_shares_of_gpus_of_the_example(env: dict[str, str]) -> None:
    queues = {queue.path: queue for queue in hopsgpu.inventory().queues}
    default, training = queues["root.default"], queues["root.training"]
    assert (default.guaranteed, default.maximum) == (3, 6)
    assert (training.guaranteed, training.maximum) == (9, 12)
    code, found = doctor(env, "--no-session", *QUEUE)
    assert code == 0, found
    assert found["queue"]["seen"] == "root.training: 9 GPUs guaranteed, at most 12, 0 used"


def test_nodes_that_fail_or_are_slow_are_named_and_the_others_are_looked_at(
    env: dict[str, str], directory: Path
) -> None:
    slow = f'#!/bin/sh\nsleep {SLOW_SECONDS}\nexec {{}} "$@"\n'
    with nvidia_smi(directory, "node2", FAILING), nvidia_smi(directory, "node3", slow):
        code, found = doctor(env, *QUEUE, "--seconds", str(PATIENCE_SECONDS))
    wrong = [name for name, state in states(found).items() if state == "wrong"]
    assert (code, wrong) == (1, ["discovery"]), (found["gang"], found["discovery"])
    assert found["discovery"]["seen"] == "ran on 1 node (node1), and not on node2"
    failed, late = found["discovery"]["details"]
    assert re.match("node2: .*could not communicate with the NVIDIA driver", failed)
    assert late.startswith("node3 not checked: no container started there in time: ")
    assert found["executor python"]["state"] == "ok"


def test_a_context_made_by_spark_defaults_holds_a_gang(env: dict[str, str], tmp_path: Path) -> None:
    """As an administrator installs them, with the lines that are commented out."""
    files = HadoopConf.load(env).get("fs.defaultFS")
    shipped = LakePath(f"{files}/apps/hopsgpu")
    shipped.make()
    packed = pack(tmp_path)
    for file in (packed.scripts, packed.package):
        (shipped / file.name).upload(file)
    name = "spark-defaults.conf"
    text = (ROOT / "spark-conf" / name).read_text()
    text = re.sub(r"^#(?=spark\.)", "", text, flags=re.MULTILINE)
    (tmp_path / name).write_text(text + Path(env["SPARK_CONF_DIR"], name).read_text())
    submit = [f"{env['SPARK_HOME']}/bin/spark-submit", "--properties-file", str(tmp_path / name)]
    submitted([*submit, *own_script(tmp_path)], env)
