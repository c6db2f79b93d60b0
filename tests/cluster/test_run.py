"""`hopsgpu run` on a real cluster: scripts that know nothing of hopsgpu, as torchrun runs them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import ModelStore
from hopsgpu.artifacts.kept_files import read_kept
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake_root import default_root
from tests.bounds import HANG_SECONDS
from tests.cluster.test_launch import gang_jvms
from tests.cluster.test_submit import ROOT, Started, client_env, ends, started
from tests.conftest import EXAMPLES, gpus_become, until

SCRIPTS = EXAMPLES / "scripts"
# Small, so that several ranks fit beside other tests.
SMALL = ("--cores-per-worker", "1", "--memory-per-worker", "1g", "--acquire-timeout", "off")
EPOCHS = 12
# What travels is the working directory, with a module that is found by PYTHONPATH, and a file.
JOB = """
import argparse, os, pickle, sys
import elsewhere

class Note:
    def __init__(self, text):
        self.text = text

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--code", type=int)
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    note = pickle.loads(pickle.dumps(Note(open("config/words.txt").read())))
    print("found", note.text, elsewhere.WORD, ascii(args.rest), os.environ["RANK"], flush=True)
    sys.exit(args.code)
"""

CONFLICT = """
import os
os.makedirs("snapshots", exist_ok=True)
with open("snapshots/latest", "w") as file:
    file.write(os.environ["RANK"])
"""


@pytest.fixture(scope="module")
def env(cluster_env: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in cluster_env.items() if k != "PYTHONPATH"}


@pytest.fixture(scope="module")
def root(env: dict[str, str]) -> str:
    return default_root(env)


def copy_of(name: str, directory: Path) -> Path:
    """A project of its own: what torchrun leaves in it would travel."""
    return Path(shutil.copytree(SCRIPTS / name, directory / name))


def running(env: dict[str, str], directory: Path, *arguments: str) -> Started:
    command = [sys.executable, "-m", "hopsgpu.cli.main", "run", *arguments]
    return started(command, client_env(env), directory)


def losses(output: str) -> list[str]:
    return re.findall(r"epoch \d+ loss \S+", output)


def output_of_torchrun(
    directory: Path, arguments: Sequence[str], ranks: int = 2, **variables: str
) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def losses_of_torchrun(directory: Path, *arguments: str) -> list[str]:
    return losses(output_of_torchrun(directory, arguments))


def run_id_in(text: str) -> str:
    found = re.search(r"[\w.-]+-\d{8}-\d{6}-[0-9a-f]{6}", text)
    assert found, text[-4000:]
    return found[0]


def test_scripts_give_the_losses_that_torchrun_gives(
    env: dict[str, str], root: str, manager: ClusterManager, tmp_path: Path
) -> None:
    before = manager.gpus()[0]
    ddp, hydra_app = copy_of("ddp", tmp_path), copy_of("hydra_app", tmp_path)
    kept = ("--checkpoint-dir", "snapshots", "--model", "ddp-digits", "--model-dir", "out")
    first = running(env, ddp, *SMALL, "--nproc_per_node=2", *kept, "train.py", "--epochs", "3")
    second = running(
        env,
        hydra_app,
        *(*SMALL, "--workers", "2", "--gpus-per-worker", "0", "--output", "outputs"),
        *("train.py", "optimizer=adam", "epochs=4"),
    )
    (code, out, err), (hydra_code, hydra_out, hydra_err) = ends(first, second)
    assert code == 0, out + err
    assert hydra_code == 0, hydra_out + hydra_err
    assert gpus_become(manager, before), manager.gpus()
    expected = losses_of_torchrun(ddp, "train.py", "--epochs", "3")
    assert losses(out) == expected and len(expected) == 3
    expected = losses_of_torchrun(hydra_app, "train.py", "optimizer=adam", "epochs=4")
    assert losses(hydra_out) == expected and len(expected) == 4

    model = ModelStore(f"{root}/models").get("ddp-digits")
    assert [file for file in model.files] == ["model.pt"]
    store = RunStore(root)
    assert list(read_kept(store.directory(run_id_in(err))).files) == ["snapshots/snapshot.pt"]
    target = tmp_path / "downloaded"
    run_id = run_id_in(hydra_err)
    command = [sys.executable, "-m", "hopsgpu.cli.main", "runs", "download", run_id, str(target)]
    ((code, said, err),) = ends(started(command, client_env(env)))
    assert code == 0 and run_id in said, err
    (config,) = {file.read_text() for file in target.rglob(".hydra/config.yaml")}
    assert "torch.optim.Adam" in config


def test_a_script_continues_from_its_snapshot_after_the_loss_of_an_executor(
    env: dict[str, str],
    root: str,
    cluster_dir: Path,
    manager: ClusterManager,
    tmp_path: Path,
) -> None:
    before, others = manager.gpus()[0], gang_jvms(cluster_dir)
    ddp = copy_of("ddp", tmp_path)
    expected = losses_of_torchrun(ddp, "train.py", "--epochs", str(EPOCHS))
    shutil.rmtree(ddp / "snapshots")
    command = ("--workers", "2", "--max-restarts", "3", "--checkpoint-dir", "snapshots")
    arguments = ("train.py", "--epochs", str(EPOCHS), "--pause", "1.5")
    run = running(env, ddp, *SMALL, *command, *arguments)
    try:
        assert until(lambda: has_snapshot(root, run)), run.err.read_text()
        os.kill((gang_jvms(cluster_dir) - others).pop(), signal.SIGKILL)
        ((code, out, err),) = ends(run)
    finally:
        run.process.kill()
    assert code == 0, out + err
    assert gpus_become(manager, before), manager.gpus()
    printed = losses(out)
    assert dict.fromkeys(printed) == dict.fromkeys(expected), out
    assert printed[-1] == expected[-1]
    # Without a snapshot, the second attempt would have begun with epoch 0 again.
    assert printed.count(expected[0]) == 1, out
    assert "continues at epoch" in out + err


def has_snapshot(root: str, run: Started) -> bool:
    """Whether a run's first snapshot is on the lake."""
    assert run.process.poll() is None, run.out.read_text() + run.err.read_text()
    if not losses(run.out.read_text()):
        return False
    run_id = run_id_in(run.err.read_text())
    try:
        return bool(read_kept(RunStore(root).directory(run_id)).files)
    except StoreError as error:
        assert error.kind == "absent", error
        return False


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a script, whose module is in the directory `library` beside it."""
    directory, library = tmp_path / "project", tmp_path / "library"
    (directory / "config").mkdir(parents=True)
    library.mkdir()
    (directory / "job.py").write_text(JOB)
    (directory / "config" / "words.txt").write_text("from the directory")
    (library / "elsewhere.py").write_text("WORD = 'from elsewhere'\n")
    (directory / "conflict.py").write_text(CONFLICT)
    return directory


@pytest.mark.yarn
def test_in_cluster_mode_all_travels_and_the_exit_code_comes_back(
    env: dict[str, str], gpus_back: Callable[[], int], project: Path
) -> None:
    library = project.with_name("library")
    words = ["a b", "$(id)", "é"]
    command = [sys.executable, "-m", "hopsgpu.cli.main", "run", "--deploy-mode", "cluster"]
    command += [*SMALL, "job.py", "--code", "7", *words]
    path = os.pathsep.join([str(ROOT), str(library)])
    kept = ("--workers", "2", "--gpus-per-worker", "0", "--checkpoint-dir", "snapshots")
    (code, out, err), (conflict_code, conflict_out, conflict_err) = ends(
        started(command, {**env, "PYTHONPATH": path}, project),
        # In containers of their own: the ranks of one would share the file.
        running(env, project, *SMALL, *kept, "conflict.py"),
    )
    assert code == 7, out + err
    assert f"found from the directory from elsewhere {ascii(words)} 0" in out + err
    assert conflict_code == 1, conflict_out + conflict_err
    expected = "ranks 0 and 1 wrote different content into snapshots/latest, and checkpoint_dir"
    assert expected in conflict_err


def test_scripts_are_launched_from_python(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(project.with_name("library"))
    args = ["--code", "0", "a b"]
    planned = hopsgpu.plan(project / "job.py", args=args, workers=2, working_dir=project)
    assert planned.spec.name == "job" and planned.spec.workers == 2
    with hopsgpu.hold(workers=1, cores_per_worker=1, progress="off") as gang:
        results = [
            gang.launch(str(project / "job.py"), args, working_dir=project, progress="off")
            for _ in range(2)
        ]
        assert [result.values for result in results] == [(0,), (0,)]
        with pytest.raises(hopsgpu.RankFailed, match="exit code 3") as failed:
            gang.launch(project / "job.py", ["--code", "3"], working_dir=project, progress="off")
        assert failed.value.exit_code == 3
        # Without a working directory the script travels alone, with its modules.
        with pytest.raises(hopsgpu.RankFailed, match=r"FileNotFoundError.*config/words\.txt"):
            gang.launch(project / "job.py", args, progress="off")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    run = hopsgpu.submit(
        "job",
        args=args,
        working_dir=".",
        cores_per_worker=1,
        memory_per_worker="1g",
        progress="off",
    )
    assert run.result().values == (0,)
