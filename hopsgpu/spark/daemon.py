"""Spark's Python daemon of an executor, which keeps what its workers leave in YARN's sight.

Spark runs it as `python -m hopsgpu.spark.daemon` (`spark.python.daemon.module`). A process daemon
outlives the task that starts it, and would become a child of init: outside the tree of processes
whose memory YARN counts as the container's. This daemon adopts it, being a subreaper.
"""

from __future__ import annotations

from hopsgpu.linux import become_subreaper


def main() -> None:
    """Serve as `pyspark.daemon` does."""
    from pyspark import daemon

    become_subreaper()
    daemon.manager()


if __name__ == "__main__":
    main()
