"""Training on past the longest life of HDFS tokens, in both deploy modes, with a keytab."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu import devcluster
from hopsgpu.devcluster.realm import REALM, Realm
from tests.cluster.test_submit import application_in, client_env, ends, started, submitting
from tests.conftest import until

pytestmark = [pytest.mark.soak]
Env = dict[str, str]
# Spark plans new tokens for three quarters of the first.
RENEW, LONGEST = 240.0, 300.0
JOB = """
    import sys, time
    from pathlib import Path
    import hopsgpu
    from hopsgpu.backends.spark.jvm import Jvm

    def train(seconds):
        gang, began, step = hopsgpu.context(), time.monotonic(), 0
        while time.monotonic() - began < seconds:
            step += 1
            Path("state").write_text(f"{gang.rank} at {step}")
            gang.save_checkpoint("state", step)
            time.sleep(15)
        (gang.model_dir / f"part-{gang.rank}").write_text("weights")
        return step

    if __name__ == "__main__":
        spark = hopsgpu.session("outlives its tokens")
        print("due", time.time() + Jvm(spark.sparkContext).seconds_to_new_tokens(), flush=True)
        result = hopsgpu.launch(
            train, args=(float(sys.argv[1]),), workers=2, model=sys.argv[2], name=sys.argv[2],
            memory_per_worker="512m", cores_per_worker=1, progress="off", retries=0,
        )
        print("steps", *result.values, "warnings", *result.warnings)
        print("trained", result.timeline.returned - result.timeline.started)
        assert not result.warnings, result.warnings
"""


@pytest.fixture(scope="module")
def cluster_dir(tmp_path_factory: pytest.TempPathFactory, own_tmpdir: Path) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("short-lived")
    encrypted = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
    conf = {
        "yarn-site": {"yarn.nodemanager.admin-env.TMPDIR": str(own_tmpdir)},
        "spark-defaults": encrypted,
    }
    lifetimes = (RENEW, LONGEST)
    try:
        devcluster.up(
            directory,
            kerberos=True,
            privacy=True,
            # As some clusters are; the others here have SPNEGO.
            simple_web=True,
            token_lifetimes=lifetimes,
            conf=conf,
            keep_classes=True,
        )
        yield directory
    finally:
        devcluster.down(directory)


def test_tokens_are_replaced_though_the_name_node_is_away_when_they_are_due(
    cluster_dir: Path, tmp_path: Path
) -> None:
    env = {**os.environ, **devcluster.environment(cluster_dir), "HOPSGPU_LOG": "info"}
    realm = Realm(cluster_dir / "kerberos")
    script = tmp_path / "outlives.py"
    script.write_text(textwrap.dedent(JOB))
    given = ["--principal", f"alice@{REALM}", "--keytab", str(realm.keytab("alice"))]
    seconds = LONGEST + 120
    both = [
        started(
            submitting("--deploy-mode", mode, *given, str(script), str(seconds), mode),
            client_env(env) if mode == "client" else env,
        )
        for mode in ("client", "cluster")
    ]
    try:
        assert until(lambda: devcluster.status(cluster_dir).gpus_used == 4, step=1.0)
        said = re.search(r"^due ([\d.]+)$", both[0].out.read_text(), re.MULTILINE)
        assert said is not None
        due = float(said[1])
        assert until(lambda: time.time() > due - 5, RENEW)
        (name_node,) = (
            d.pid for d in devcluster.status(cluster_dir).daemons if d.name == "namenode"
        )
        os.kill(name_node, signal.SIGKILL)
        # Spark's client of HDFS tries for ten seconds.
        assert until(lambda: time.time() > due + 25, RENEW)
        devcluster.up(cluster_dir)
    finally:
        client, cluster = ends(*both)
    assert client[0] == 0, client[1] + client[2][-3000:]
    assert "asks Spark to get them now" in client[1] + client[2]
    trained = re.search(r"^trained ([\d.]+)$", client[1], re.MULTILINE)
    assert trained is not None and float(trained[1]) >= seconds
    assert cluster[0] == 0, cluster[2][-3000:]
    assert "SUCCEEDED" in cluster[2] and application_in(cluster[2])
    assert until(lambda: devcluster.status(cluster_dir).gpus_used == 0)
