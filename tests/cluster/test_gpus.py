"""Bad GPUs, types and parts of GPUs on a real cluster; GPUs are simulated where there are none."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends import gang_request
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.run_values import RunStatus
from tests.conftest import gpus_become
from tests.in_ranks import own_gpu

BROKEN = "<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>"

# More than any wait here takes.
MINUTES = 30


@contextlib.contextmanager
def said_by(node: Path, change: Callable[[str], str]) -> Iterator[None]:
    """While inside, a node's nvidia-smi says something else."""
    smi = node / "bin" / "nvidia-smi"
    before = smi.read_text()
    assert (after := change(before)) != before
    # In place of it at once: a NodeManager and containers run it at any time.
    smi.with_name("new").write_text(after)
    smi.with_name("new").chmod(0o755)
    smi.with_name("new").replace(smi)
    try:
        yield
    finally:
        smi.with_name("new").write_text(before)
        smi.with_name("new").chmod(0o755)
        smi.with_name("new").replace(smi)


def gpus_of(directory: Path, node: str) -> list[str]:
    """UUIDs of a node's GPUs."""
    said = (directory / "nodes" / node / "bin" / "nvidia-smi").read_text()
    return list(dict.fromkeys(re.findall(r"<uuid>(GPU-[^<]+)</uuid>", said)))


def test_a_bad_gpu_gets_no_rank_and_the_wait_says_so(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    cluster_dir: Path,
    nothing_warmed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad, good = gpus_of(cluster_dir, "node1")
    waits: list[str] = []

    def note(status: RunStatus) -> None:
        waits.append(status.waiting_for)

    def is_told() -> bool:
        return any("1 executor gets no rank" in wait and bad in wait for wait in waits)

    def now() -> float:
        """The wait's time is over as soon as it has told."""
        return time.monotonic() + (MINUTES * 60 if is_told() else 0)

    def breaks(said: str) -> str:
        return said.replace(f"<uuid>{bad}</uuid>", f"<uuid>{bad}</uuid>{BROKEN}")

    with (
        said_by(cluster_dir / "nodes" / "node1", breaks),
        hopsgpu.hold(workers=3, progress="off") as gang,
    ):
        values = gang.launch(own_gpu, progress="off").values
        assert {gpu for gpus in values for gpu in gpus} >= {good}
        assert bad not in {gpu for gpus in values for gpu in gpus}
        # Of four GPUs three are good: who wants another one waits, and says for what.
        monkeypatch.setattr(gang_request, "time", SimpleNamespace(monotonic=now))
        with pytest.raises(hopsgpu.GangTimeout, match=f"{bad} of node1 is bad: a row of its"):
            hopsgpu.launch(own_gpu, acquire_timeout=f"{MINUTES}m", progress=note)
    assert is_told()


@pytest.fixture
def forgetting(spark: SparkSession) -> Iterator[None]:
    """What NodeManagers told before counts for nothing, nor after."""
    application = application_of(spark)
    application.__dict__.pop("node_managers", None)
    yield
    application.__dict__.pop("node_managers", None)


@pytest.mark.soak
def test_gpus_of_a_type_and_two_ranks_that_share_one(
    spark: SparkSession,
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    cluster_dir: Path,
    forgetting: None,
) -> None:
    def seen() -> tuple[tuple[str, ...], str]:
        import os

        return hopsgpu.context().gpus, os.environ["CUDA_VISIBLE_DEVICES"]

    names = re.findall(
        "<product_name>([^<]+)", (cluster_dir / "nodes/node2/bin/nvidia-smi").read_text()
    )
    with said_by(cluster_dir / "nodes" / "node2", lambda said: said.replace(names[0], "Tesla T4")):
        with pytest.raises(hopsgpu.ConfigError, match="gpu_type='H100': no node .*'Tesla T4' on"):
            hopsgpu.plan(own_gpu, gpu_type="H100")
        planned = hopsgpu.plan(own_gpu, workers=2, gpu_type="tesla")
        assert planned.hosts == {"node2"} and "GPUs of type tesla, on node2" in str(planned)
        with pytest.raises(hopsgpu.CapacityError):
            hopsgpu.plan(own_gpu, workers=3, gpu_type="t4")
        result = hopsgpu.launch(
            seen,
            workers=4,
            gpus_per_worker=0.5,
            gpu_type="t4",
            memory_per_worker="512m",
            progress="off",
        )
        assert {rank.host for rank in result.ranks} == {"node2"}
    assert all(gpus == (visible,) for gpus, visible in result.values)
    ones = [gpus[0] for gpus, _ in result.values]
    assert ones[0] == ones[1] != ones[2] == ones[3]
    assert gpus_become(manager, 0)


@pytest.mark.soak
def test_a_gpu_of_another_type_gets_no_rank(
    spark: SparkSession,
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    cluster_dir: Path,
    forgetting: None,
) -> None:
    """The NodeManagers told before that all have it."""
    hopsgpu.plan(own_gpu, gpu_type="a100")
    smi = cluster_dir / "nodes" / "node1" / "bin" / "nvidia-smi"
    name = re.findall("<product_name>([^<]+)", smi.read_text())[0]
    with said_by(cluster_dir / "nodes" / "node1", lambda said: said.replace(name, "Tesla T4")):
        result = hopsgpu.launch(own_gpu, workers=2, gpu_type="a100", progress="off")
        assert {rank.host for rank in result.ranks} == {"node2"}
    assert gpus_become(manager, 0)
