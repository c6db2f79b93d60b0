"""Runs the benchmarks on a cluster of their own; prints tables and writes bench.json."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import hopsgpu
from benchmarks import channel, contention, launches, output, warm
from hopsgpu import cluster


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hopsgpu-bench-") as directory:
        state = Path(directory) / "cluster"
        cluster.up(state)
        try:
            os.environ.update(cluster.environment(state))
            spark = hopsgpu.session("bench")
            try:
                figures = {
                    "release": launches.release(spark),
                    "acquisition": launches.acquisition(spark),
                    "cold": warm.cold(spark),
                }
                held = warm.held(spark)
            finally:
                spark.stop()
            others = warm.rivals()
            warm.show(held, others)
            figures["warm"] = {**held, **others}
            for workers in (3, 4):
                figures[f"two of {workers} on 4"] = contention.measure(workers)
        finally:
            cluster.down(state)
    figures["channel"] = channel.measure()
    figures["output"] = output.measure()
    Path("bench.json").write_text(json.dumps(figures, indent=1) + "\n")
    print("\nwritten to bench.json")


if __name__ == "__main__":
    main()
