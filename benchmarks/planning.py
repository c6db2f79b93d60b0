"""The plan of a launch on a large table: footers read, rows dealt, and what each rank gets.

The table has the footers of 1,000 files of 1 GB, without their rows. Each reader is a process of
its own, so that its memory can be measured; `pyarrow` reads the footers with as many threads.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import fs, parquet

from benchmarks.readers import arrow_files, run_readers, table_places, write_copies
from benchmarks.table import heading, row
from hopsgpu.data.footer_cache import FooterCache
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import THREADS, read_source
from hopsgpu.storage.lake import LakePath

_FILES = 1_000
_GROUPS = 8
_COLUMNS = 100
_ROUNDS = 5
_RANKS = 8
# What a reader of a file with less would read whole.
_FILE_BYTES = 300_000
_MODULE = "benchmarks.planning"


def measure(files: int = _FILES, rounds: int = _ROUNDS) -> dict[str, dict[str, list[float]]]:
    """Plan a launch on a table on the local disk, and on HDFS.

    Returns:
        For each lake, the seconds and MiB of memory of each reader, and the most bytes of a rank,
        in each round.
    """
    with table_places() as places:
        return {name: _measured(name, lake, files, rounds) for name, lake in places.items()}


def _measured(name: str, lake: LakePath, files: int, rounds: int) -> dict[str, list[float]]:
    _write(lake, files)
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for what, arguments in (
                ("pyarrow", ["pyarrow", lake.url]),
                ("first launch", ["plan", lake.url, cache]),
                ("second launch", ["plan", lake.url, cache]),
            ):
                (told,) = run_readers(_MODULE, [arguments])
                if told["groups"] != files * _GROUPS:
                    raise AssertionError(f"row groups are missing: {told}")
                taken.setdefault(f"{what}, seconds", []).append(told["seconds"])
                taken.setdefault(f"{what}, MiB", []).append(told["mib"])
        taken.setdefault("a rank's part, kB", []).append(told["rank_bytes"] / 1000)
    heading(f"Footers of {files:,} files of {_GROUPS} row groups, {_COLUMNS} columns, {name}")
    for what, figures in taken.items():
        row(what, figures)
    pairs = zip(taken["pyarrow, seconds"], taken["first launch, seconds"], strict=True)
    ratio = statistics.median(theirs / ours for theirs, ours in pairs)
    print(f"the first launch has {ratio:.2f} of pyarrow's rate (target: at least 0.9)", flush=True)
    return taken


def _write(lake: LakePath, files: int) -> None:
    rows = 10 * _GROUPS
    numbers = {f"feature{n:03}": np.random.default_rng(n).random(rows) for n in range(_COLUMNS)}
    texts = {f"text{n:03}": [f"value {i % 7}" for i in range(rows)] for n in range(_COLUMNS // 5)}
    sink = pa.BufferOutputStream()
    columns = dict(list(numbers.items())[: _COLUMNS - len(texts)])
    parquet.write_table(pa.table({**columns, **texts}), sink, row_group_size=10)
    content = sink.getvalue().to_pybytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    content = content[:-footer] + bytes(max(0, _FILE_BYTES - len(content))) + content[-footer:]
    write_copies(lake, content, files)


def _read_with_pyarrow(url: str) -> dict[str, float]:
    files, path = arrow_files(url)
    names = [info.path for info in files.get_file_info(fs.FileSelector(path))]
    with ThreadPoolExecutor(THREADS) as threads:
        footers = threads.map(lambda name: parquet.read_metadata(name, filesystem=files), names)
        return {"groups": sum(footer.num_row_groups for footer in footers)}


def _plan(url: str, cache: str) -> dict[str, float]:
    source = read_source(LakePath(url), cache=FooterCache(Path(cache), "benchmark"))
    shards = [shard.dump() for shard in plan_shards(source, _RANKS)]
    return {
        "groups": sum(len(file.groups) for file in source.files),
        "rank_bytes": max(map(len, shards)),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    parser.add_argument("reader", choices=["pyarrow", "plan"])
    parser.add_argument("url")
    parser.add_argument("cache", nargs="?")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.reader == "plan":
        told = _plan(options.url, options.cache)
    else:
        told = _read_with_pyarrow(options.url)
    told["seconds"] = time.perf_counter() - began
    told["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(told))


if __name__ == "__main__":
    _main()
