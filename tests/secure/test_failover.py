"""Two ResourceManagers and two NameNodes, by Kerberos and HTTPS: the active ones are killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from requests_gssapi import HTTPSPNEGOAuth

from hopsgpu import devcluster
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.devcluster.realm import REALM, Realm
from hopsgpu.storage.hadoop_conf import HadoopConf
from tests.bounds import HANG_SECONDS
from tests.cluster.test_submit import Started, client_env, ends, started, submitting
from tests.conftest import until

pytestmark = [pytest.mark.soak]
Env = dict[str, str]
JOB = """
    import sys, time
    from pathlib import Path
    import hopsgpu

    def train(seconds, mebibytes):
        gang, began, step = hopsgpu.context(), time.monotonic(), 0
        while time.monotonic() - began < seconds:
            step += 1
            Path("state").write_text(f"{gang.rank} at {step}")
            gang.save_checkpoint("state", step)
            time.sleep(1)
        block = bytes(range(256)) * 4096
        with (gang.model_dir / f"part-{gang.rank}").open("wb") as part:
            for _ in range(mebibytes):
                part.write(block)
        return step

    if __name__ == "__main__":
        name, workers, seconds, mebibytes = sys.argv[1:]
        hopsgpu.session(name)
        result = hopsgpu.launch(
            train, args=(float(seconds), int(mebibytes)), workers=int(workers), model=name,
            name=name, memory_per_worker="1g", cores_per_worker=1, retries=0,
        )
        print("steps", *result.values)
        print("freed", result.timeline.released)
        print("model", result.model.url)
"""


@pytest.fixture(scope="module")
def cluster_dir(tmp_path_factory: pytest.TempPathFactory, own_tmpdir: Path) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("highly-available")
    conf = {"yarn-site": {"yarn.nodemanager.admin-env.TMPDIR": str(own_tmpdir)}}
    try:
        devcluster.up(
            directory,
            kerberos=True,
            https=True,
            namenode_ha=True,
            resourcemanager_ha=True,
            conf=conf,
        )
        yield directory
    finally:
        devcluster.down(directory)


@pytest.fixture(scope="module")
def alice(cluster_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    """Her environment, this process's too."""
    variables = devcluster.environment(cluster_dir)
    variables["KRB5CCNAME"] = f"FILE:{tmp_path_factory.mktemp('tickets') / 'alice'}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        keytab = str(Realm(cluster_dir / "kerberos").keytab("alice"))
        subprocess.run(["kinit", "-k", "-t", keytab, "alice"], check=True)
        yield dict(os.environ)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "alone" / "highly_available.py"
    file.parent.mkdir()
    file.write_text(textwrap.dedent(JOB))
    return file


@pytest.fixture(autouse=True)
def all_alive(cluster_dir: Path, alice: Env) -> Iterator[None]:
    """Ends with every daemon alive, and every GPU free by the ResourceManager's account."""
    yield
    devcluster.up(cluster_dir)
    manager = ResourceManager(web_addresses(HadoopConf.load(alice).get))
    assert until(lambda: manager.gpus()[0] == 0)


def active_resource_manager(url: str) -> bool:
    answer = _get(f"{url}/ws/v1/cluster/info")
    return (answer or {}).get("clusterInfo", {}).get("haState") == "ACTIVE"


def active_name_node(url: str) -> bool:
    answer = _get(f"{url}/jmx?qry=Hadoop:service=NameNode,name=NameNodeStatus")
    return bool(answer) and answer["beans"][0]["State"] == "active"


def _get(url: str) -> Any:
    try:
        answer = requests.get(url, auth=HTTPSPNEGOAuth(), timeout=5, allow_redirects=False)
        return answer.json()
    except (requests.RequestException, ValueError):
        return None


def kill_active(cluster_dir: Path, kind: str, is_active: Callable[[str], bool]) -> str:
    (active,) = (
        daemon
        for daemon in devcluster.status(cluster_dir).daemons
        if daemon.name.startswith(kind) and is_active(daemon.web)
    )
    os.kill(active.pid, signal.SIGKILL)
    return active.name


@contextlib.contextmanager
def jobs(*commands: tuple[list[str], Env]) -> Iterator[list[Started]]:
    """Starts them; none outlives the test, however it ends."""
    with contextlib.ExitStack() as until_the_end:
        begun = []
        for command, env in commands:
            begun.append(started(command, env))
            until_the_end.callback(begun[-1].process.kill)
        yield begun


def test_a_resource_manager_dies_under_a_gang_and_a_line(
    cluster_dir: Path, alice: Env, script: Path
) -> None:
    env = client_env(alice)
    with jobs((submitting(str(script), "first", "3", "40", "1"), env)) as first:
        assert until(lambda: devcluster.status(cluster_dir).gpus_used == 3, step=0.5)
        # It finds one GPU, and waits for the other.
        with jobs((submitting(str(script), "second", "2", "2", "1"), env)) as second:
            assert until(lambda: "waiting:" in second[0].out.read_text())
            kill_active(cluster_dir, "resourcemanager", active_resource_manager)
            ended = ends(*first, *second)
    for code, out, err in ended:
        assert code == 0, out + err[-3000:]
        assert re.search(r"^steps \d+", out, re.MULTILINE), out
        # The release was confirmed by the other one.
        assert re.search(r"^freed [\d.]+$", out, re.MULTILINE), out
    assert hopsgpu(env, "models").count("first") == 1


def test_a_name_node_dies_while_a_model_is_published(
    cluster_dir: Path, alice: Env, script: Path
) -> None:
    env = client_env(alice)
    with jobs((submitting(str(script), "large", "2", "3", "300"), env)) as running:
        assert until(lambda: "publishing" in running[0].out.read_text(), step=0.02)
        killed = kill_active(cluster_dir, "namenode", active_name_node)
        ((code, out, err),) = ends(*running)
    assert code == 0, (killed, out + err[-3000:])
    models = hopsgpu(env, "models")
    assert "large" in models, models
    target = script.parent / "downloaded"
    hopsgpu(env, "models", "download", "large", str(target))
    assert sum(file.stat().st_size for file in target.rglob("part-*")) == 2 * 300 * 2**20


def test_a_driver_in_yarn_asks_by_https(cluster_dir: Path, alice: Env, script: Path) -> None:
    """It has no variable of the submitter's; the certificates are shipped."""
    keytab = Realm(cluster_dir / "kerberos").keytab("alice")
    given = ["--deploy-mode", "cluster", "--principal", f"alice@{REALM}", "--keytab", str(keytab)]
    with jobs((submitting(*given, str(script), "inside", "2", "2", "1"), alice)) as running:
        ((code, out, err),) = ends(*running)
    assert code == 0, out + err[-3000:]
    assert "SUCCEEDED" in err
    assert "inside" in hopsgpu(alice, "models")


def test_a_root_on_webhdfs_by_https(cluster_dir: Path, alice: Env, script: Path) -> None:
    (active,) = (
        daemon.web
        for daemon in devcluster.status(cluster_dir).daemons
        if daemon.name.startswith("namenode") and active_name_node(daemon.web)
    )
    root = f"swebhdfs://{active.removeprefix('https://')}/user/alice/over-https"
    env = client_env({**alice, "HOPSGPU_ROOT": root})
    with jobs((submitting(str(script), "web", "2", "2", "1"), env)) as running:
        ((code, out, err),) = ends(*running)
    assert code == 0, out + err[-3000:]
    assert f"model {root}/models/web/1" in out


def hopsgpu(env: Env, *arguments: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "hopsgpu.cli.main", *arguments]
    ran = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
