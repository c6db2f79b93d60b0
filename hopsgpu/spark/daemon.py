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
    from pyspark import daemon

    # A gang's executor forks two workers, the placeholder's and the agent's, and both import this.
    # A module that is imported here must not start a thread, and must not be or import one of a
    # user's, whose files come with the tasks.
    from hopsgpu.agent import placeholder  # noqa: F401

    become_subreaper()
    daemon.manager()


if __name__ == "__main__":
    main()
