"""Runs the benchmarks on a cluster of their own; prints tables and writes bench.json."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import hopsgpu
from benchmarks import launches
from hopsgpu import cluster


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hopsgpu-bench-") as directory:
        state = Path(directory) / "cluster"
        cluster.up(state)
        try:
            os.environ.update(cluster.environment(state))
            spark = hopsgpu.session("bench")
            try:
                figures = {"launches": launches.measure(spark)}
            finally:
                spark.stop()
        finally:
            cluster.down(state)
    Path("bench.json").write_text(json.dumps(figures, indent=1) + "\n")
    print("\nwritten to bench.json")


if __name__ == "__main__":
    main()
