"""Spark's Python daemon of an executor, which adopts orphans so that YARN counts their memory.

Spark runs it as `python -m hopsgpu.spark.daemon` (`spark.python.daemon.module`). A process daemon
(`hopsgpu.agent.process_daemon`) outlives the task that starts it. Without a subreaper, the process
daemon would become a child of init, outside the process tree whose memory YARN counts.
"""

from __future__ import annotations

from hopsgpu.linux import become_subreaper
from hopsgpu.spark import bytecode_importer


def main() -> None:
    bytecode_importer.install()
    # Import nothing else before the workers are forked: an imported module of the standard library
    # would hide a user's module of the same name, which arrives with the tasks.
    from pyspark import daemon

    become_subreaper()
    daemon.manager()


if __name__ == "__main__":
    main()
