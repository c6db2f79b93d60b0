"""A first day on a standalone master: a job with its modules, refusals, rivals, and kills.

`make standalone` runs most of the other tests of a cluster on such a master, too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu import devcluster
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.manager_table import configured_manager
from hopsgpu.monitoring.observation import Monitor
from hopsgpu.web.page_sources import live_sources
from tests.bounds import HANG_SECONDS
from tests.cluster.test_standalone_lifecycle import hopsgpu as cluster_command
from tests.cluster.test_standalone_lifecycle import kill
from tests.conftest import HDFS_SITE, gpus_become, until
from tests.contention import both_finish, start_script

GPUS = 4
MODULE = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return torch.full((4,), float(index)), torch.tensor([float(index * index)])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x)
"""
SCRIPT = """
    import argparse, json, logging
    from dataclasses import dataclass

    import hopsgpu
    from shapes import Net, Squares

    @dataclass
    class Options:
        epochs: int

    def train(options):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler
        from tqdm import tqdm

        logging.getLogger("train").warning("a line of logging")
        context = hopsgpu.context()
        dist.init_process_group("gloo")
        model = DistributedDataParallel(Net())
        data = Squares()
        loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=1)
        steps = 0
        for epoch in range(options.epochs):
            for x, y in tqdm(loader, disable=None):
                (model(x) - y).square().mean().backward()
                steps += 1
        if context.rank == 0:
            torch.save(model.module.state_dict(), context.model_dir / "net.pt")
        return steps, context.gpus, context.world_size

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=1)
        options = Options(**vars(parser.parse_args()))
        spark = hopsgpu.session("first day")
        numbers = spark.sparkContext.parallelize(range(8), 2)
        assert numbers.map(lambda n: Squares()[n][1].item()).sum()
        result = hopsgpu.launch(train, args=(options,), workers=2, model="net", progress="lines")
        released = dict(result.timeline.phases())["released"]
        print("RESULT", json.dumps([result.values, result.model.url, released]))
"""
TOO_LARGE = """
    import hopsgpu

    hopsgpu.session("too large")
    hopsgpu.launch(int, workers=5)
"""
HOLDER = """
    import os, sys
    import hopsgpu

    hopsgpu.session("holder")
    with hopsgpu.hold(workers=2, cores_per_worker=1, progress="off") as gang:
        for line in sys.stdin:
            print("LAUNCHED", *gang.launch(os.getpid, progress="off").values, flush=True)
    print("LEFT", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("standalone")
    try:
        devcluster.up(
            directory, is_standalone=True, conf={"hdfs-site": {**HDFS_SITE}}, keep_classes=True
        )
        yield directory
    finally:
        devcluster.down(directory)


@pytest.fixture(scope="module")
def env(cluster: Path) -> dict[str, str]:
    return {**os.environ, **devcluster.environment(cluster)}


@pytest.fixture
def manager(env: dict[str, str]) -> Iterator[ClusterManager]:
    """The master, which must have all GPUs back at the end."""
    one = configured_manager(env)
    assert one.gpus() == (0, GPUS)
    yield one
    assert gpus_become(one, 0), one.gpus()


def hopsgpu(env: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hopsgpu.cli.main", *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )


def test_a_job_with_its_modules(
    env: dict[str, str], manager: ClusterManager, tmp_path: Path
) -> None:
    (tmp_path / "shapes.py").write_text(textwrap.dedent(MODULE))
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ran = hopsgpu(env, "submit", script, "--epochs", 2)
    assert ran.returncode == 0, ran.stderr
    values, url, released = json.loads(ran.stdout.partition("RESULT ")[2])
    assert [(steps, world) for steps, _, world in values] == [(8, 2), (8, 2)]
    assert len({gpu for _, gpus, _ in values for gpu in gpus}) == 2
    assert url.startswith("hdfs://") and released < 10.0
    assert "a line of logging" in ran.stdout
    # The master knows the end of the application, and the record leads to it.
    run = json.loads(hopsgpu(env, "runs", "--json").stdout)[0]
    assert re.fullmatch(r"app-\d{14}-\d{4}", run["application"])
    assert manager.end_of(run["application"]).startswith("FINISHED")


def test_what_a_standalone_master_lacks_is_refused(
    env: dict[str, str], manager: ClusterManager, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.touch()
    for words, refusal in (
        (("--deploy-mode", "cluster"), "a standalone master runs no Python drivers"),
        (("--detach",), "a standalone master runs no Python drivers"),
        (("--queue", "root.a"), "a standalone master has no queues"),
        (("--image", "a/b:1"), "only YARN and Kubernetes start executors in images"),
    ):
        ran = hopsgpu(env, "submit", *words, script)
        assert ran.returncode == 1 and refusal in ran.stderr, (words, ran.stderr)
    nobody = "spark.hopsgpu.master.ui=http://127.0.0.1:1"
    ran = hopsgpu(env, "submit", "--conf", nobody, script)
    assert ran.returncode == 1 and "does not answer" in ran.stderr, ran.stderr


def test_a_gang_that_can_never_fit_is_refused(env: dict[str, str], manager: ClusterManager) -> None:
    with start_script(env, TOO_LARGE) as driver:
        _, error = driver.communicate(timeout=HANG_SECONDS)
    assert "CapacityError" in error and "room for 4" in error, error


@pytest.mark.soak
def test_rivals_for_all_gpus_all_finish(env: dict[str, str], manager: ClusterManager) -> None:
    both_finish(env, GPUS, 1)


def test_a_gang_outlives_the_master(
    cluster: Path, env: dict[str, str], manager: ClusterManager
) -> None:
    with start_script(env, HOLDER) as driver:
        assert driver.stdin is not None and driver.stdout is not None

        def launch() -> list[str]:
            assert driver.stdin is not None and driver.stdout is not None
            driver.stdin.write("\n")
            driver.stdin.flush()
            return driver.stdout.readline().split()

        assert launch()[0] == "LAUNCHED"
        assert manager.gpus()[0] == 2
        kill(cluster, "master")
        # The gang needs the master only to grow and to end.
        assert launch()[0] == "LAUNCHED"
        assert cluster_command(cluster, "up").returncode == 0
        assert until(lambda: manager.gpus() == (2, GPUS))
        assert launch()[0] == "LAUNCHED"
        _, error = driver.communicate(timeout=HANG_SECONDS)
    assert driver.returncode == 0 and "did not confirm" not in error, error


def test_a_killed_driver_holds_no_gpu(env: dict[str, str], manager: ClusterManager) -> None:
    with start_script(env, HOLDER) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline().startswith("LAUNCHED")
        driver.send_signal(signal.SIGKILL)
        assert gpus_become(manager, 0)


def test_listing_pages_and_exporter_say_who_has_gpus(
    env: dict[str, str], manager: ClusterManager
) -> None:
    with start_script(env, HOLDER) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline().startswith("LAUNCHED")
        seen = json.loads(hopsgpu(env, "gpus", "--json").stdout)
        assert (seen["gpus"]["used"], seen["gpus"]["free"]) == (2, 2)
        (user,) = seen["users"]
        assert (user["name"], user["gpus"]) == ("holder", 2)
        assert sum(user["hosts"].values()) == 2
        table = hopsgpu(env, "gpus").stdout
        assert "holder" in table and "node1" in table
        sources = live_sources((), env)
        assert sources.cluster().used == 2
        assert sources.pages.application(user["id"]) == manager.application_page(user["id"])
        look = Monitor(env, lambda: ((), ()), lambda line: None).look()
        assert look.gpus is not None and look.gpus.used == 2
        assert look.sources["resource_manager"].is_up
        driver.communicate(timeout=HANG_SECONDS)
