"""Spark's Python daemon of an executor, which keeps its descendants in YARN's sight.

Spark runs it as `python -m hopsgpu.spark.daemon` (`spark.python.daemon.module`). A process daemon
(`hopsgpu.agent.process_daemon`) outlives the task that starts it, and would become a child of init:
outside the tree of processes whose memory YARN counts as the container's. As a subreaper, this
module's process adopts it.
"""

from __future__ import annotations

from hopsgpu.linux import become_subreaper
from hopsgpu.spark import bytecode_importer


def main() -> None:
    """Serve as `pyspark.daemon` does."""
    bytecode_importer.install()
    # Nothing else is imported here for the workers, which are forked: a module of Python's that is
    # imported already would hide a user's of the same name, which comes with the tasks.
    from pyspark import daemon

    become_subreaper()
    daemon.manager()


if __name__ == "__main__":
    main()
