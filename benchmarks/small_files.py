"""The first epoch of two ranks on thousands of small files, compared with `pyarrow.dataset`.

Each reader is a process of its own. CPU seconds of processes are compared, because a machine's
other work hardly changes them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import dataset, parquet

from benchmarks.readers import arrow_files, run_readers, table_places, write_copies
from benchmarks.table import heading, row
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.storage.lake import LakePath

_FILES = 5_000
_ROWS = 100
_WIDTH = 32
_BATCH = 1024
_RANKS = 2
_ROUNDS = 5
_MODULE = "benchmarks.small_files"
# However full the disk is.
_CACHE_BYTES = 1024**3


def measure(files: int = _FILES, rounds: int = _ROUNDS) -> dict[str, dict[str, list[float]]]:
    """Read files of 100 rows of 32 float32 from the local disk, and from HDFS.

    Returns:
        For each lake, the CPU seconds and the seconds of pyarrow's dataset, of all ranks' first
        epochs, and of their later epochs, in each round.
    """
    with table_places() as places:
        return {name: _measured(name, lake, files, rounds) for name, lake in places.items()}


def _measured(name: str, lake: LakePath, files: int, rounds: int) -> dict[str, list[float]]:
    _write(lake, files)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        shards = [Path(directory) / f"shard{rank}" for rank in range(_RANKS)]
        for path, shard in zip(shards, plan_shards(read_source(lake), _RANKS), strict=True):
            path.write_bytes(shard.dump())
        for _ in range(rounds):
            (theirs,) = run_readers(_MODULE, [["dataset", lake.url]])
            ours = run_readers(_MODULE, [["rank", str(path)] for path in shards])
            if theirs["rows"] != files * _ROWS or sum(o["rows"] for o in ours) != files * _ROWS:
                raise AssertionError(f"rows are missing: {theirs}, {ours}")
            for what, figure in (
                ("pyarrow.dataset, CPU", theirs["cpu"]),
                ("first epoch of two ranks, CPU", sum(one["cpu"] for one in ours)),
                ("pyarrow.dataset, seconds", theirs["seconds"]),
                ("first epoch, seconds", max(one["seconds"] for one in ours)),
                ("second epoch, seconds", max(one["again"] for one in ours)),
            ):
                taken.setdefault(what, []).append(figure)
    heading(f"{files:,} Parquet files of {_ROWS} rows of {_WIDTH} float32, {name}; seconds")
    for what, figures in taken.items():
        row(what, figures)
    cpu = zip(taken["first epoch of two ranks, CPU"], taken["pyarrow.dataset, CPU"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in cpu)
    print(
        f"the ranks' CPU is {ratio:.2f} times pyarrow.dataset's (target: at most 1.2)", flush=True
    )
    return taken


def _write(lake: LakePath, files: int) -> None:
    values = np.random.default_rng(0).random((_ROWS, _WIDTH), dtype=np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), _WIDTH)
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"x": lists, "y": np.arange(_ROWS)}), sink)
    write_copies(lake, sink.getvalue().to_pybytes(), files)


def _read_dataset(url: str) -> Iterator[int]:
    files, path = arrow_files(url)
    yield sum(batch.num_rows for batch in dataset.dataset(path, filesystem=files).to_batches())


def _read_shard(path: str) -> Iterator[int]:
    shard = Shard.load(Path(path).read_bytes())
    with (
        tempfile.TemporaryDirectory() as directory,
        RankData(shard, Path(directory), _CACHE_BYTES) as data,
    ):
        for _ in range(2):
            yield sum(len(batch["y"]) for batch in data.batches(_BATCH))


def _main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    parser.add_argument("reader", choices=["dataset", "rank"])
    parser.add_argument("source")
    options = parser.parse_args()
    read = _read_dataset if options.reader == "dataset" else _read_shard
    figures: list[tuple[int, float, float]] = []
    began, used = time.perf_counter(), time.process_time()
    for rows in read(options.source):
        figures.append((rows, time.perf_counter() - began, time.process_time() - used))
        began, used = time.perf_counter(), time.process_time()
    rows, seconds, cpu = figures[0]
    print(json.dumps({"rows": rows, "seconds": seconds, "cpu": cpu, "again": figures[-1][1]}))


if __name__ == "__main__":
    _main()
