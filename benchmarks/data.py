"""Rows per second into a rank: hopsgpu's batches compared with bare Arrow and others' loops.

All read the same rows, of 32 float32, from HDFS or from the local disk, in turn in each round.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
from fsspec.core import url_to_fs
from pyarrow import fs, parquet

from benchmarks import loops
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.storage.lake import LakePath

_ROWS = 2_000_000
_FILES = 4
_GROUP = 65_536
_WIDTH = 32
_BATCH = 1024
_ROUNDS = 9
# A loop of rows is too slow for all of them; petastorm has ten times as many.
_LOOPED = 50_000
# Of 32 MiB, as hopsgpu's.
_WINDOW = 2**18

Batches = Iterable[Mapping[str, Any]]


def measure(rows: int = _ROWS, rounds: int = _ROUNDS) -> dict[str, dict[str, list[float]]]:
    """Read the rows as a list column, of fixed length and as Spark writes it, and as 32 columns.

    Returns:
        For each layout and way the million rows a second of each round.
    """
    with scratch() as lake, tempfile.TemporaryDirectory() as directory:
        return {
            name: _measured(name, table, lake / name, Path(directory) / name, rounds)
            for name, table in _layouts(rows).items()
        }


def _layouts(rows: int) -> dict[str, pa.Table]:
    values = np.random.default_rng(0).random((rows, _WIDTH), dtype=np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), _WIDTH)
    columns = {f"x{n}": np.ascontiguousarray(values[:, n]) for n in range(_WIDTH)}
    return {
        "list of 32": pa.table({"x": lists}),
        "list as Spark writes it": pa.table({"x": lists.cast(pa.list_(pa.float32()))}),
        "32 columns": pa.table(columns),
    }


def _measured(
    layout: str, table: pa.Table, lake: LakePath, local: Path, rounds: int
) -> dict[str, list[float]]:
    rows = table.num_rows
    local.mkdir()
    shard = _written(table, lake)
    with pa.ipc.new_file(local / "mapped.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=_GROUP)
    taken: dict[str, list[float]] = {}
    # Lists as Spark writes them do not tell how long they all are.
    given = {"shapes": {"x": (_WIDTH,)}} if "Spark" in layout else {}
    with RankData(shard, local / "warm") as data, contextlib.ExitStack() as later:
        batches = functools.partial(data.batches, _BATCH, **given)
        tensors = functools.partial(data.torch, _BATCH, **given)
        _passed(batches())

        def cold(budget: int | None) -> None:
            # Removed when it has been timed, as a rank's is at its end.
            fresh = later.enter_context(RankData(shard, local / "cold", budget))
            _passed(fresh.batches(_BATCH, **given))

        ways: dict[str, tuple[Callable[[], object], int]] = {
            "mapped Arrow, each value read": (lambda: _summed(_mapped(local)), rows),
            "hopsgpu, warm, each value read": (lambda: _summed(batches()), rows),
            "mapped Arrow, views": (lambda: _passed(_mapped(local)), rows),
            "hopsgpu, warm, views": (lambda: _passed(batches()), rows),
            "hopsgpu, warm, torch": (lambda: _passed(tensors()), rows),
            "hopsgpu, warm, shuffled": (lambda: _passed(batches(shuffle=True)), rows),
            "hopsgpu, warm, torch, shuffled": (lambda: _passed(tensors(shuffle=True)), rows),
            "plain pyarrow from the lake": (lambda: _passed(_plain(lake)), rows),
            "hopsgpu, cold": (lambda: cold(None), rows),
            "hopsgpu, cold, nothing kept": (lambda: cold(0), rows),
        }
        part, most = table.slice(0, _LOOPED), table.slice(0, 10 * _LOOPED)
        rivals = {
            "TorchDistributor's loop": (loops.torch_distributor(part, local, _BATCH), len(part)),
            "petastorm, Parquet on the disk": (loops.petastorm(most, local, _BATCH), len(most)),
            "petastorm, the same shuffled": (
                loops.petastorm(most, local, _BATCH, _WINDOW),
                len(most),
            ),
        }
        ways |= {name: (loop, n) for name, (loop, n) in rivals.items() if not isinstance(loop, str)}
        for _ in range(rounds):
            for name, (way, count) in ways.items():
                began = time.perf_counter()
                way()
                taken.setdefault(name, []).append(count / (time.perf_counter() - began) / 1e6)
                later.close()
    print(f"\n{rows:,} rows of 32 float32, as {layout}; million rows a second")
    print(f"\n{'':36}{'median':>8}{'least':>8}{'most':>8}", flush=True)
    for name, figures in taken.items():
        middle = statistics.median(figures)
        print(f"{name:36}{middle:8.3f}{min(figures):8.3f}{max(figures):8.3f}", flush=True)
    _compare(taken)
    for reason in dict.fromkeys(loop for loop, _ in rivals.values() if isinstance(loop, str)):
        print(reason)
    return taken


def _compare(taken: Mapping[str, list[float]]) -> None:
    for ours, theirs, wanted in (
        ("hopsgpu, warm, each value read", "mapped Arrow, each value read", 0.8),
        ("hopsgpu, warm, views", "mapped Arrow, views", 0.8),
        ("hopsgpu, warm, shuffled", "hopsgpu, warm, each value read", 0.5),
        ("hopsgpu, warm, torch, shuffled", "hopsgpu, warm, torch", 0.5),
        ("hopsgpu, cold", "plain pyarrow from the lake", 0.9),
        ("hopsgpu, warm, torch", "TorchDistributor's loop", 30),
        ("hopsgpu, warm, torch", "petastorm, Parquet on the disk", None),
        ("hopsgpu, warm, torch, shuffled", "petastorm, the same shuffled", None),
    ):
        if theirs in taken:
            # Of one round, since others use the machine too.
            pairs = zip(taken[ours], taken[theirs], strict=True)
            ratio = statistics.median(one / other for one, other in pairs)
            told = f" (target: {wanted})" if wanted else ""
            print(f"{ours} is {ratio:.2f} times {theirs}{told}")


def _written(table: pa.Table, lake: LakePath) -> Shard:
    lake.make()
    share = -(-table.num_rows // _FILES)
    for number in range(_FILES):
        sink = pa.BufferOutputStream()
        part = table.slice(number * share, share)
        parquet.write_table(part, sink, row_group_size=_GROUP, use_dictionary=False)
        (lake / f"{number}.parquet").write(sink.getvalue().to_pybytes())
    return plan_shards(read_source(lake), 1)[0]


def _mapped(local: Path) -> Iterator[Mapping[str, Any]]:
    """Yield batches of bare Arrow at its best: views of record batches, each converted once."""
    with pa.memory_map(str(local / "mapped.arrow")) as source:
        file = pa.ipc.open_file(source)
        for number in range(file.num_record_batches):
            yield from _views(file.get_batch(number))


def _plain(lake: LakePath) -> Iterator[Mapping[str, Any]]:
    system, path = url_to_fs(lake.url)
    files = fs.PyFileSystem(fs.FSSpecHandler(system))
    for number in range(_FILES):
        with files.open_input_file(f"{path}/{number}.parquet") as source:
            for batch in parquet.ParquetFile(source).iter_batches(_GROUP):
                yield from _views(batch)


def _views(batch: pa.RecordBatch) -> Iterator[Mapping[str, Any]]:
    arrays = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        arrays[name] = (column.flatten() if column.type.num_fields else column).to_numpy()
    for first in range(0, batch.num_rows, _BATCH):
        yield {
            name: array[first * len(array) // batch.num_rows :][
                : min(_BATCH, batch.num_rows - first) * len(array) // batch.num_rows
            ]
            for name, array in arrays.items()
        }


def _passed(batches: Batches) -> None:
    for _ in batches:
        pass


def _summed(batches: Batches) -> float:
    return sum(float(array.sum()) for batch in batches for array in batch.values())


@contextlib.contextmanager
def scratch() -> Iterator[LakePath]:
    """Provide a directory on the HDFS that the environment names, or on the local disk."""
    with tempfile.TemporaryDirectory() as local:
        root = f"file://{local}"
        if configuration := os.environ.get("HADOOP_CONF_DIR"):
            site = ElementTree.parse(Path(configuration) / "core-site.xml")
            found = {p.findtext("name"): p.findtext("value") for p in site.iter("property")}
            root = str(found["fs.defaultFS"])
        lake = LakePath(f"{root}/tmp/hopsgpu-bench-{uuid.uuid4().hex}")
        lake.make()
        try:
            yield lake
        finally:
            lake.remove()


if __name__ == "__main__":
    measure()
