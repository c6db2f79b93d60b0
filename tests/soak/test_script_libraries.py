"""Scripts with other people's libraries: `hopsgpu run` on a cluster prints what torchrun prints.

What they need is the extra "libraries", which `make soak` installs.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.storage.lake_root import default_root
from tests.cluster.test_run import (
    SMALL,
    copy_of,
    has_snapshot,
    output_of_torchrun,
    run_id_in,
    running,
)
from tests.cluster.test_submit import ends
from tests.conftest import gpus_become, until

LAUNCHERS = Path(__file__).resolve().parents[1] / "scripts" / "launchers"
Env = dict[str, str]
# Ranks of one container share its directory, as those of torchrun do.
ON_CPUS = (*SMALL, "--memory-per-worker", "2g", "--gpus-per-worker", "0", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def env(cluster_env: Env) -> Env:
    return {k: v for k, v in cluster_env.items() if k != "PYTHONPATH"}


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where DeepSpeed keeps what it compiles, which takes a minute and more."""
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The scripts, with a file of text and configurations."""
    directory = Path(shutil.copytree(LAUNCHERS, tmp_path / "project"))
    (directory / "lines.txt").write_text("\n".join(f"line {n} of {n * n}" for n in range(32)))
    (directory / "default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
    )
    training = {
        **{"train_file": "lines.txt", "output_dir": "trained", "use_cpu": True},
        **{"max_steps": 3, "per_device_train_batch_size": 4, "report_to": "none"},
    }
    (directory / "training.json").write_text(json.dumps(training))
    (directory / "training.yaml").write_text(
        "".join(f"{name}: {json.dumps(value)}\n" for name, value in training.items())
    )
    return directory


# Not the rank that hopsgpu puts before each line, with its node.
LOSS = re.compile(r"(?:rank \d (?!node)|\d ranks|epoch|with_)[^\n]*? loss \d+\.\d+")


def printed(text: str) -> list[str]:
    """The losses that ranks print, in order: two ranks may print at once, even into one line."""
    return sorted(LOSS.findall(text))


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("accumulate.py",), {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (("accumulate.py", "--config", "default_config.yaml"), {}),
        (("accumulate.py",), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
        (("trainer.py", "training.json"), {}),
        (("trainer.py", "training.yaml"), {}),
        (("zero.py", "1"), {}),
        (("zero.py", "2"), {}),
        (("zero.py", "3"), {}),
        (("parallel.py", "3"), {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "+".join(value),
)
def test_the_losses_are_those_of_torchrun(
    env: Env,
    manager: ClusterManager,
    project: Path,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    extensions: Path,
) -> None:
    before = manager.gpus()[0]
    if arguments[0] == "zero.py":
        variables = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    words = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    # accelerate takes CPUs only where it is told to; hopsgpu tells ranks without GPUs. First, so
    # that DeepSpeed compiles here: a compiler takes more memory than the ranks have.
    expected = printed(
        output_of_torchrun(project, arguments, ACCELERATE_USE_CPU="true", **variables)
    )
    for left in ("checkpoints", "trained"):
        shutil.rmtree(project / left, ignore_errors=True)
    ((code, out, err),) = ends(running(env, project, *ON_CPUS, *words, *arguments))
    assert code == 0, out + err
    assert printed(out) == expected and expected
    assert gpus_become(manager, before)


def test_checkpoints_of_all_ranks_are_put_back(env: Env, project: Path) -> None:
    kept = ("--name", "parallel", "--checkpoint-dir", "checkpoints")
    ((code, out, err),) = ends(running(env, project, *ON_CPUS, *kept, "parallel.py", "3"))
    assert code == 0, out + err
    again = (*ON_CPUS, *kept, "--resume", "latest", "parallel.py", "5")
    ((code, out, err),) = ends(running(env, project, *again))
    assert code == 0, out + err
    assert {"rank 0 continues after step 2", "rank 1 continues after step 2"} <= {
        line.partition("] ")[2] for line in out.splitlines()
    }
    steps = printed(output_of_torchrun(project, ("parallel.py", "5")))
    assert printed(out) == [line for line in steps if not re.search(r"sharded [012] ", line)]
    # The record names the run that "latest" stood for.
    record = RunStore(default_root(env)).record(run_id_in(err))
    assert record.spec.resume is not None and record.spec.resume.startswith("parallel-")


def test_a_lightning_cli(env: Env, tmp_path: Path) -> None:
    project = copy_of("lightning_cli", tmp_path)
    arguments = ("train.py", "fit", "--config", "config.yaml", "--trainer.devices", "2")
    arguments += ("--trainer.accelerator", "cpu")
    ((code, out, err),) = ends(running(env, project, *ON_CPUS, *arguments))
    assert code == 0, out + err
    expected = printed(output_of_torchrun(project, arguments))
    assert printed(out) == expected and len(expected) == 3


@pytest.mark.parametrize("name", ["test_script", "test_sync"])
def test_accelerates_own_scripts(env: Env, tmp_path: Path, name: str) -> None:
    module = f"accelerate.test_utils.scripts.{name}"
    ((code, out, err),) = ends(running(env, tmp_path, *ON_CPUS, "-m", module))
    assert code == 0, (out + err)[-6000:]


def test_frameworks_without_a_process_group(env: Env, project: Path) -> None:
    one = (
        *SMALL,
        "--memory-per-worker",
        "2g",
        "--gpus-per-worker",
        "0",
        "--env",
        "JAX_PLATFORMS=cpu",
    )
    ((code, out, err),) = ends(running(env, project, *one, "single.py"))
    assert code == 0, out + err
    expected = printed(output_of_torchrun(project, ("single.py",), 1, JAX_PLATFORMS="cpu"))
    assert printed(out) == expected and len(expected) == 3


def test_an_elastic_gang_grows_when_a_snapshot_is_on_the_lake(
    env: Env, manager: ClusterManager, tmp_path: Path
) -> None:
    ddp, epochs = copy_of("ddp", tmp_path), 40
    (ddp / "wait.py").write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "while not Path(sys.argv[1]).exists():\n    time.sleep(0.1)\n"
    )
    before, go = manager.gpus()[0], tmp_path / "go"
    holder = running(env, ddp, *SMALL, "--workers", "2", "--name", "holder", "wait.py", str(go))
    elastic = ("--workers", "2:4", "--conf", "spark.hopsgpu.elastic.interval=1s")
    kept = ("--checkpoint-dir", "snapshots")
    run = None
    try:
        assert until(lambda: manager.gpus()[0] == before + 2), holder.err.read_text()
        arguments = ("train.py", "--epochs", str(epochs), "--pause", "1")
        run = running(env, ddp, *SMALL, *elastic, *kept, *arguments)
        assert until(lambda: has_snapshot(default_root(env), run)), run.err.read_text()
        go.touch()
        (code, out, err), (holder_code, _, holder_err) = ends(run, holder)
    finally:
        for one in filter(None, (run, holder)):
            one.process.kill()
    assert holder_code == 0, holder_err
    assert code == 0, out + err
    assert "world 1: 4 of 2 to 4 ranks" in err
    numbers = [int(number) for number in re.findall(r"epoch (\d+) loss", out)]
    assert set(numbers) == set(range(epochs)) and numbers[-1] == epochs - 1
    assert "rank 3 continues at epoch" in out
    assert gpus_become(manager, before), manager.gpus()
