"""Spark's Python daemon of an executor, which keeps its descendants in YARN's sight.

Spark runs it as `python -m hopsgpu.spark.daemon` (`spark.python.daemon.module`). A process daemon
(`hopsgpu.agent.process_daemon`) outlives the task that starts it, and would become a child of init:
outside the tree of processes whose memory YARN counts as the container's. As a subreaper, this
module's process adopts it.

The daemon forks a worker for each task that runs at the same time, and again when one was killed.
"""

from __future__ import annotations

from hopsgpu.linux import become_subreaper
from hopsgpu.spark import bytecode_importer


def main() -> None:
    """Serve as `pyspark.daemon` does."""
    bytecode_importer.install()
    from pyspark import daemon

    become_subreaper()
    daemon.manager()


if __name__ == "__main__":
    main()
