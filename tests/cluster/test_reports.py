"""What users of other launchers report of ordinary code; tests/reports.md has the list."""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

import hopsgpu


@pytest.fixture(scope="module")
def gang(spark: SparkSession) -> Iterator[hopsgpu.Gang]:
    """Two ranks, with torch imported ahead of them."""
    with hopsgpu.hold(workers=2, cores_per_worker=1, progress="off") as held:
        yield held


class _Kind(enum.Enum):
    """By name; those of a script, as below, go by value."""

    DENSE = 1


def test_what_a_rank_has_of_its_own_and_of_the_driver(
    gang: hopsgpu.Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layer(enum.Enum):
        DENSE = ("dense", 2)
        LINEAR = ("dense", 2)
        CONV = ("conv", 4)

        def __init__(self, label: str, rank: int) -> None:
            self.label, self.rank = label, rank

    class Access(enum.Flag):
        READ = 1
        WRITE = 2
        BOTH = 3

    def look(layer: Layer) -> tuple[list[float], dict[str, str | None], object]:
        import torch

        names = ("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT", "JAX_ENABLE_X64")
        same = layer is Layer.LINEAR, layer.rank, Access.BOTH is Access.READ | Access.WRITE
        drawn = [torch.rand(1).item(), torch.rand(1).item()]
        return (
            drawn,
            {name: os.environ.get(name) for name in names},
            (same, Layer.CONV, _Kind.DENSE),
        )

    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    values = [
        value
        for _ in range(2)
        for value in gang.launch(look, (Layer.DENSE,), progress="off").values
    ]
    assert len({number for drawn, _, _ in values for number in drawn}) == 2 * 2 * 2
    for _, environment, found in values:
        assert environment == dict.fromkeys(environment, "1")
        assert found == ((True, 2, True), Layer.CONV, _Kind.DENSE)


def test_variables_that_the_function_sets_count(gang: hopsgpu.Gang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def as_in_tutorials() -> tuple[int, float]:
        os.environ["OMP_NUM_THREADS"] = "2"
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(port)
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        total = torch.ones(1)
        distributed.all_reduce(total)
        distributed.destroy_process_group()
        return torch.get_num_threads(), total.item()

    result = gang.launch(as_in_tutorials, progress="off", run_timeout="2m")
    assert result.values == ((2, 2.0), (2, 2.0))
    (warning,) = result.warnings
    assert warning.startswith("train_fn sets MASTER_ADDR and MASTER_PORT, which hopsgpu has set")


def test_what_cannot_be_had_in_a_rank_is_said(gang: hopsgpu.Gang) -> None:
    def ask() -> str:
        return input("go on? ")

    def nest() -> object:
        return hopsgpu.session("inner")

    with pytest.raises(hopsgpu.RankFailed, match="EOFError(.|\n)*a rank has no terminal"):
        gang.launch(ask, progress="off")
    with pytest.raises(hopsgpu.RankFailed, match="a rank cannot start a Spark session"):
        gang.launch(nest, progress="off")
